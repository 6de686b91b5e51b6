"""By which command each result file is made again, and where that command says so.

``make gpu`` makes all that judges; times are taken alone on a card; two files need something else
than the machine: another vLLM, and AutoRound.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Again(NamedTuple):
    """A way to make a result file again."""

    command: str
    place: str  # file of this checkout in which it is found
    words: str  # that stand there


GPU, TWO = "make gpu", "make gpu, two cards"
OTHER_ENGINE = "python3 benchmarks/gpu/engine_proofs.py --stage speculation, with vLLM {0}"
_ENGINE, _RELEASES = "tests/gpu/test_engine.py", "tests/gpu/test_releases.py"
WAYS: tuple[tuple[str, Again], ...] = (
    (r"engine-(0\.\d+\.\d+)", Again(OTHER_ENGINE, "proofs/stages.py", '"speculation":')),
    (r"engine-(two-gpus)", Again(TWO, _ENGINE, '_failed("{0}"')),
    (r"engine-(prefixes)-failed", Again(GPU, _ENGINE, '_failed("{0}"')),
    (r"engine-([\w-]+)", Again(GPU, _ENGINE, '_failed("{0}"')),
    (r"(dflash|prefixes|steered)", Again("make cpu-proofs", "proofs/engine/on_cpu.py", '"{0}"')),
    (r"plain-models", Again("RESULTS=write pytest tests/host/test_plain_models.py",
                            "tests/host/test_plain_models.py", "plain-models.json")),
    (r"recall-formats", Again("python3 -m proofs.recall.by_format WEIGHTS OUT",
                              "proofs/recall/by_format.py", "argparse")),
    (r"recall-training(?:-further)?", Again("make gpu-train", "Makefile", "proofs.recall.race")),
    (r"recall-([\w-]+)", Again(GPU, "proofs/recall/verdicts.py", '"{0}": judge_')),
    (r"release-(cluster)", Again(TWO, _RELEASES, '_failed("{0}"')),
    (r"release-([\w-]+)", Again(GPU, _RELEASES, '_failed("{0}"')),
    (r"serve-[\w-]+-(pictures|long)", Again(GPU, "tests/gpu/test_serve.py", '"{0}")')),
    (r"serve-([\w-]+)", Again(GPU, "tests/gpu/test_serve.py", '"{0}": "')),
    (r"(lm-head-batches|experts|marlin-atomic-add|turboquant-layer)",
     Again(GPU, "proofs/recorded.py", '"{0}": [')),
    (r"(lm-head[\w-]*)", Again("make gpu-times", "Makefile", "/{0}.json")),
    (r"(requantize)", Again("python3 benchmarks/gpu/requantize.py", "benchmarks/gpu/requantize.py",
                            '"{0}.json"')),
)  # fmt: skip
"""By the whole name of a result; the first one counts."""


def again(name: str) -> Again:
    """Return how the result file ``name`` (without its ending) is made again.

    Raises:
        ValueError: no command makes it.
    """
    for pattern, way in WAYS:
        if found := re.fullmatch(pattern, name):
            return Again(*(text.format(*found.groups()) for text in way))
    raise ValueError(f"{name}: no command makes this result; fix: name one in proofs/again.py")
