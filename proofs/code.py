"""Which code a result was made with: digests of the modules that ran and of those that judged.

A result file carries them, and docs/reference/results.md says which are older than the code here.
Comments, docstrings and layout do not count, nor the room of the contract that an import names.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    **dict.fromkeys(("proofs", "lab", "tests", "spark_deploy"), ""),
    "spark_vllm": "files/image",
    "spark_host": "files/host",
    "spark_contract": "files/contract",
    "spark_checkpoint": "files/checkpoint",
    "timing": "benchmarks/gpu",
}
"""Where the packages of this repository lie; imports of others are not looked into."""
NEVER = (
    "proofs/again.py",
    "proofs/code.py",
    "proofs/failed.py",
    "proofs/recorded.py",
    "proofs/stages.py",
)
"""They write down what was run and judged; no number is made there."""
PLUGIN = (
    "files/image/spark_vllm/*.py",
    "files/image/spark_vllm/checkpoint/*.py",
    "files/image/spark_vllm/head/*",
)
"""The engine finds it by name: nothing imports it."""
HEAD = ("files/image/spark_vllm/head/*",)
SWEEPS = ("benchmarks/gpu/lm_head_sweep.py", "benchmarks/gpu/timing.py")
CASE = ("proofs/engine/case.py", "proofs/engine/run.py")
TAUGHT = ("lab/model/facts.json", "lab/model/weights.npz")
ENGINES = (*PLUGIN, *CASE, *TAUGHT, "proofs/engine/cases.py", "proofs/trees/build.py")
WEIGHTS = "proofs/recall/weights.npz"
SINGLE = ("proofs/engine/profile_cases.py", "proofs/judges/profiles.py", "proofs/trees/special.py")
DRAFTS = (
    *(f"proofs/drafts/{name}.py" for name in ("cases", "judge", "shape", "trees")),
    "proofs/drafts/*/weights.npz",
)
"""Not how they were trained: a result rests on the weights that lie there."""
UNDRAFTED = "!proofs/drafts/*.py"
"""Judged by the judge of ``profiles``, which knows drafts, too, and without any."""
UNNAMED = "!files/image/spark_vllm/__init__.py"
"""Names and versions, of which the head takes none."""
PLANNED = ("!spark_deploy/*", "!lab/hub/*")
"""Of plans the arguments count, which stand in the results: the planner is proven elsewhere."""
RAN: dict[str, tuple[str, ...]] = {
    **{
        f"engine-{stage}": (*ENGINES, "proofs/judges/engine.py")
        for stage in ("eager", "refused", "nan", "speculation", "turboquant", "0.")
    },
    "engine-quality": (*ENGINES, "proofs/*/quality*.py", WEIGHTS),
    "engine-profiles": (*ENGINES, *SINGLE, *DRAFTS),
    "engine-sizes": (*ENGINES, *SINGLE, "proofs/engine/transformers_case.py", UNDRAFTED),
    "engine-prefixes": (
        *ENGINES,
        *SINGLE,
        "proofs/engine/talk_cases.py",
        "proofs/judges/talks.py",
        UNDRAFTED,
    ),
    "engine": (*ENGINES, *SINGLE, UNDRAFTED),
    "recall-training": ("proofs/recall/race.py", "proofs/recall/training.py"),
    "recall-formats": ("proofs/recall/by_format.py", WEIGHTS),
    "recall": (*PLUGIN, "proofs/recall/run.py", "proofs/recall/engine.py", WEIGHTS),
    "serve-v2-long": (*PLUGIN, "proofs/serve/case.py", "proofs/engine/served.py"),
    "serve": (
        *PLUGIN,
        *TAUGHT,
        "proofs/serve/case.py",
        "proofs/engine/served.py",
        "!proofs/serve/long.py",
    ),
    "release-cluster": (*PLUGIN, "proofs/releases/*.py", WEIGHTS, *PLANNED),
    "release": (*PLUGIN, *TAUGHT, "proofs/releases/*.py", *PLANNED),
    # A sweep asks every size of block, whichever the table has.
    "lm-head-sweep": ("files/image/spark_vllm/head/kernel.py", *SWEEPS, UNNAMED),
    "lm-head": (*HEAD, "benchmarks/gpu/[lt]*.py", "tests/gpu/test_lm_head.py", UNNAMED),
    "marlin": ("tests/gpu/test_marlin.py",),
    "requantize": (
        "benchmarks/gpu/requantize.py",
        "files/checkpoint/spark_checkpoint/requantize/inside.py",
        *TAUGHT,
    ),
    "experts": ("tests/gpu/test_experts.py",),
    **{
        name: (*ENGINES, *SINGLE, "proofs/engine/on_cpu.py", UNDRAFTED)
        for name in ("steered", "prefixes")
    },
    "sizes": (
        *ENGINES,
        *SINGLE,
        "proofs/engine/sizes_on_cpu.py",
        "proofs/engine/transformers_case.py",
        UNDRAFTED,
    ),
    "seeing": (
        *PLUGIN,
        *TAUGHT,
        "proofs/releases/*.py",
        "proofs/serve/seeing_on_cpu.py",
        *PLANNED,
    ),
    "dflash": (
        *ENGINES,
        *DRAFTS,
        "proofs/engine/on_cpu.py",
        "!proofs/judges/profiles.py",
        "!proofs/trees/special.py",
    ),
    "plain-models": (
        "tests/host/test_plain_models.py",
        "tests/published.py",
        "spark_deploy/planning/budget/*.py",
        "!tests/labkit.py",
        "!spark_deploy/*",
    ),
    "turboquant": ("files/image/spark_vllm/turboquant.py", "tests/gpu/test_turboquant.py"),
}
"""What each kind of result file begins with: the process that ran, its cases, its judge, its data.

What these import counts as well, and what that imports; ``!`` where imports are not followed. The
first kind that a name begins with counts.
"""
_CONTRACT_ROOM = re.compile(r"^spark_contract\.\w+\.(?=\w+$)")


def digests(name: str, root: Path = ROOT) -> dict[str, str]:
    """Return the digest of every module that the result file ``name`` rests on, by its path."""
    return {str(path.relative_to(root)): digest(path) for path in sorted(_rests_on(name, root))}


def _rests_on(name: str, root: Path) -> set[Path]:
    """Return what a result file begins with, and what that imports, however far away."""
    kind = next(kind for kind in RAN if name.startswith(kind))
    cut = [one[1:] for one in RAN[kind] if one.startswith("!")] + list(NEVER)
    begin = [path for one in RAN[kind] if one[0] != "!" for path in root.glob(one)]
    waiting = [path for path in begin if path.is_file()]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if path.suffix == ".py":
            named = {one for name in _imports(path.read_bytes()) for one in _files_of(name, root)}
            waiting += [one for one in named if not _is_cut(one.relative_to(root), cut)]
    return found


def _is_cut(path: Path, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(path.as_posix(), one) for one in patterns)


@cache
def _imports(data: bytes) -> frozenset[str]:
    """Return what a module imports of this repository, inside of functions as well."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(data)):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not followed"
            module = str(node.module)
            names |= {module, *(f"{module}.{one.name}" for one in node.names)}
    return frozenset(name for name in names if name.partition(".")[0] in ROOMS)


def _files_of(name: str, root: Path) -> list[Path]:
    """Return the file of a module, and of its packages those that do something themselves."""
    parts = name.split(".")
    room = root / ROOMS[parts[0]]
    inits = [room.joinpath(*parts[: end + 1], "__init__.py") for end in range(len(parts))]
    working = [one for one in inits if one.is_file() and not _only_words(one.read_bytes())]
    module = room.joinpath(*parts).with_suffix(".py")
    return [*working, module] if module.is_file() else working


@cache
def _only_words(data: bytes) -> bool:
    return all(_is_text(one) for one in ast.parse(data).body)


def digest(path: Path) -> str:
    """Return a digest of what a file computes; of Python what is left without its words."""
    data = path.read_bytes()
    return _of_python(data) if path.suffix == ".py" else _short(data)


@cache  # most results rest on the same modules
def _of_python(data: bytes) -> str:
    return _short(repr(_plain(_without_docstrings(ast.parse(data)))).encode())


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def changed(name: str, made_with: dict[str, str], root: Path = ROOT) -> list[str]:
    """Return the modules that are others now than those a result was made with, or gone.

    A module that is there and no longer counts for such a result does not make it older.
    """
    now = digests(name, root)
    gone = {path for path in made_with if not (root / path).exists()}
    return sorted(path for path in {*now, *gone} if now.get(path) != made_with.get(path))


def _plain(node: Any) -> Any:
    """Return what a tree says, the same in every Python: fields that say nothing are left out."""
    if isinstance(node, ast.AST):
        said = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
        return type(node).__name__, [pair for pair in said if pair[1] not in (None, [])]
    if isinstance(node, str):
        return _CONTRACT_ROOM.sub("spark_contract.", node)
    return [_plain(one) for one in node] if isinstance(node, list) else node


def _without_docstrings(tree: ast.Module) -> ast.Module:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, holders):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return tree


def _is_text(node: ast.stmt) -> bool:
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)
