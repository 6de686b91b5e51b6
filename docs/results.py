"""The page of the result files, and on other pages which of them are older than the code."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from declared import cell
from depths import with_depths

from proofs import code
from proofs.again import again

AS_HERE = "as here"
OLDER = " (older code)"
NAMED = re.compile(r"(?<![\w/.-])(?:benchmarks/results/[gc]pu/)?([\w.-]+\.json)")
BEGIN = "<!-- generated from benchmarks/results/gpu by `make docs` -->"
END = "<!-- the rest is written by hand -->"
PROOFS_BEFORE = """
**Older than the code.** These results were made before the code that they rest on was what it is
now, or keep no digests of it ([which code](results.md)). What this page says of them was seen with
the code of then:
"""
KEPT_BEFORE = """
**Kept on purpose.** Runs of before with an outcome that no later one had, beside the newest run of
the same stage, made with the code of here: what failed once is not forgotten because it held later.
"""
KEPT = {
    "recall-flashinfer-h100": "recall-flashinfer",
}
"""Results that stay though their code changed, and the newest of the same stage."""
UNBROKEN: Any = {
    "subsequent_indent": "  ",
    "break_long_words": False,
    "break_on_hyphens": False,
}
CHECKOUT = Path(__file__).resolve().parent.parent
RESULTS = CHECKOUT / "benchmarks/results"
FOLDERS = {"gpu": "On GPUs", "cpu": "On CPUs"}
SHOWN = 3
BEFORE = """
What `benchmarks/results/gpu` and `cpu` hold. A result is of one run of one machine; whoever changes
the code that it rests on (`proofs/code.py` says which that is) finds it here as older, until
somebody with such a machine has run it again. Not judged are measurements beside a claim, such as
what somebody else's code does; a guard rail that rests on one names its file. A failed row keeps
the raw answers of the engines that it names. What each file shows: [engine
proofs](engine-proofs.md). One command for each kind of machine: `make gpu-all` on a CUDA machine
(`make gpu` for all that judges, then, alone on the card, `make gpu-times`), `make cpu-all` on one
without a GPU. `make gpu-train` stays apart: it makes other weights, and all else would then be
judged by those. What a file needs beside the machine stands at its row; where that is missing its
test is skipped and says so. Both make what they need themselves (trees, plans, the model that
sees); the first writes into `SPARK_GPU_RESULTS`, the second into `build/cpu/results`, and
`plain-models.json` in its place. A machine without a network takes `build/plans` from `make
gpu-plans` elsewhere.
"""


def results_page() -> Iterator[str]:
    """Yield the page."""
    yield "<!-- generated from benchmarks/results/gpu and proofs/code.py by `make docs` -->"
    yield "# Result files"
    yield BEFORE
    for folder, title in FOLDERS.items():
        yield from (f"## {title}", "")
        yield "| result | made | on | held | not judged | failed | code | made again by |"
        yield "|---|---|---|---|---|---|---|---|"
        for path in sorted((RESULTS / folder).glob("*.json")):
            cells = _cells(folder, path)
            yield f"| {' | '.join(cell(str(one)) for one in cells)} |"
        yield ""


def _cells(folder: str, path: Path) -> tuple[object, ...]:
    found = json.loads(path.read_text("utf-8"))
    verdicts = [row["passed"] for row in found.get("rows", []) if "passed" in row]
    counts = (verdicts.count(True), verdicts.count(None), verdicts.count(False))
    link = f"[{path.name}](../../benchmarks/results/{folder}/{path.name})"
    made = found.get("date") or "not kept"
    by = "kept as it is" if path.stem in KEPT else _by(path.stem)
    return (link, made, _device(found), *counts, age(path.stem, found), by)


def _by(name: str) -> str:
    way = again(name)
    part = "" if way.command == f"make {way.part}" else f", of it `{way.part}`"
    return f"`{way.command}`{part}{f'; needs {way.needs}' if way.needs else ''}"


def age(name: str, found: dict[str, Any]) -> str:
    """Say whether a result was made with the code of this checkout."""
    if "code" not in found:
        return "not known: no digests were kept"
    other = [Path(path).name for path in code.changed(name, found["code"])]
    if not other:
        return AS_HERE
    more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
    kept = f"kept beside {KEPT[name]}, " if name in KEPT else ""
    return f"{kept}older: {', '.join(other[:SHOWN])}{more} changed"


def _listed(names: list[str]) -> Iterator[str]:
    for device in sorted({older()[name] for name in names}):
        links = (
            f"[{path.stem}](../../{path.relative_to(CHECKOUT)})"
            for path in _files()
            if path.name in names and older()[path.name] == device
        )
        yield from textwrap.wrap(f"- {device}: {', '.join(links)}", 118, **UNBROKEN)
    if not names:
        yield "- none"


@functools.cache
def older() -> dict[str, str]:
    """Return the result files that were made with other code than this, and where."""
    found = {path: json.loads(path.read_text("utf-8")) for path in _files()}
    return {
        path.name: _device(one) for path, one in found.items() if age(path.stem, one) != AS_HERE
    }


def _files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((RESULTS / folder).glob("*.json"))]


def device_of(name: str) -> str:
    """Return the short name of what a result was made on, such as H100."""
    [path] = (path for path in _files() if path.name == name)
    device = _device(json.loads(path.read_text("utf-8")))
    return next((word for word in device.split() if re.match(r"[A-Z]+\d", word)), device)


def _device(found: dict[str, Any]) -> str:
    return str(found.get("device") or "not kept").partition(",")[0].partition("\n")[0]


def marked(text: str) -> str:
    """Return a text that says of each result file it names whether that is older."""
    return NAMED.sub(lambda name: name[0] + (OLDER if name[1] in older() else ""), text)


def proofs_page() -> Iterator[str]:
    """Yield the page of the proofs, with its list of older results made anew."""
    page = (CHECKOUT / "docs/reference/engine-proofs.md").read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    yield before + BEGIN
    yield PROOFS_BEFORE
    yield from _listed([name for name in older() if name.removesuffix(".json") not in KEPT])
    yield KEPT_BEFORE
    yield from _listed([name for name in older() if name.removesuffix(".json") in KEPT])
    yield ""
    yield with_depths(END + rest.partition(END)[2])
