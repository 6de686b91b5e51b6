"""By which command each result file is made again, and where that command says so.

One for each kind of machine: ``make gpu-all``, ``make cpu-all``; their parts may be called alone.
``make gpu-train`` stays apart: it makes other weights. Some files need more than the machine.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Again(NamedTuple):
    """A way to make a result file again."""

    part: str  # of the Makefile
    place: str  # file of this checkout in which the result is found
    words: str  # that stand there
    needs: str = ""  # beside the machine

    @property
    def command(self) -> str:
        """The one command of its kind of machine."""
        return f"make {WHOLE.get(self.part, self.part)}"


WHOLE = {
    **dict.fromkeys(("gpu", "gpu-times"), "gpu-all"),
    **dict.fromkeys(
        ("cpu-proofs", "cpu-sizes", "cpu-seeing", "cpu-formats", "cpu-models"), "cpu-all"
    ),
}
"""Which target has another one as its part."""
TWO = "two cards"
_ENGINE, _RELEASES = "tests/gpu/test_engine.py", "tests/gpu/test_releases.py"
WAYS: tuple[tuple[str, Again], ...] = (
    (r"engine-(0\.\d+\.\d+)", Again("gpu", "tests/gpu/test_older_engines.py", '"{0}"',
                                     "vLLM {0} in SPARK_GPU_ENGINES")),
    (r"engine-(two-gpus)", Again("gpu", _ENGINE, '_failed("{0}"', TWO)),
    (r"engine-([\w-]+)", Again("gpu", _ENGINE, '_failed("{0}"')),
    (r"(dflash|prefixes|steered)", Again("cpu-proofs", "proofs/engine/on_cpu.py", '"{0}"')),
    (r"(sizes)", Again("cpu-sizes", "proofs/engine/sizes_on_cpu.py", "{0}.json")),
    (r"(seeing)", Again("cpu-seeing", "proofs/serve/seeing_on_cpu.py", "{0}.json")),
    (r"plain-models", Again("cpu-models", "tests/host/test_plain_models.py", "plain-models.json",
                            "the lab")),
    (r"(recall-formats)", Again("cpu-formats", "Makefile", "/{0}.json")),
    (r"recall-training(?:-further|-weights)?",
     Again("gpu-train", "Makefile", "proofs.recall.race")),
    (r"recall-(flashinfer)-h100", Again("gpu", "proofs/recall/verdicts.py", '"{0}": judge_',
                                        "FlashInfer")),
    (r"recall-(flashinfer[\w-]*)", Again("gpu", "proofs/recall/verdicts.py", '"{0}": judge_',
                                         "FlashInfer")),
    (r"recall-([\w-]+)", Again("gpu", "proofs/recall/verdicts.py", '"{0}": judge_')),
    (r"release-(cluster)", Again("gpu", _RELEASES, '_failed("{0}"', TWO)),
    (r"release-([\w-]+)", Again("gpu", _RELEASES, '_failed("{0}"')),
    (r"serve-[\w-]+-(pictures|long)", Again("gpu", "tests/gpu/test_serve.py", '"{0}")')),
    (r"serve-([\w-]+)", Again("gpu", "tests/gpu/test_serve.py", '"{0}": "')),
    (r"(lm-head-batches|experts|marlin-atomic-add|turboquant-layer)",
     Again("gpu", "proofs/recorded.py", '"{0}": [')),
    (r"(lm-head[\w-]*)", Again("gpu-times", "Makefile", "/{0}.json")),
    (r"(requantize)", Again("gpu", "tests/gpu/test_requantize.py", '"{0}.json"', "AutoRound")),
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
