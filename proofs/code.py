"""Which code a result was made with: digests of the modules that ran and of those that judged.

A result file carries them, and docs/reference/results.md says which are older than the code here.
Comments, docstrings and layout do not count, nor in which room of the contract a module lies.
"""

from __future__ import annotations

import ast
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = (
    "files/image/spark_vllm/*.py",
    "files/image/spark_vllm/checkpoint/*.py",
    "files/image/spark_vllm/head/*",
)
HEAD = ("files/image/spark_vllm/head/*",)
ANSWERS = "proofs/judges/answers.py"
ENGINES = (
    "proofs/prompts.py",
    "proofs/engine/case.py",
    "proofs/engine/cases.py",
    "proofs/judges/answers.py",
    "proofs/judges/rows.py",
    "proofs/trees/build.py",
)
WEIGHTS = "proofs/recall/weights.npz"
NETWORK = ("proofs/recall/network.py", "proofs/recall/delta_rule.py", "lab/model/network.py")
TRAINING = ("proofs/recall/training.py", "proofs/recall/race.py")
BY_FORMAT = ("proofs/recall/by_format.py", "proofs/recall/formats.py")
SINGLE = ("proofs/engine/profile_cases.py", "proofs/judges/profiles.py", "proofs/trees/s*.py")
DRAFTS = (
    *(f"proofs/drafts/{name}.py" for name in ("cases", "judge", "shape", "trees")),
    "proofs/drafts/*/weights.npz",
)
"""Not how they were trained: a result rests on the weights that lie there."""
RAN: dict[str, tuple[str, ...]] = {
    **{
        f"engine-{stage}": (*PLUGIN, *ENGINES, "proofs/judges/engine.py")
        for stage in ("eager", "refused", "nan", "speculation", "turboquant")
    },
    "engine-quality": (*PLUGIN, *ENGINES, "proofs/*/quality*.py", WEIGHTS),
    "engine-profiles": (*PLUGIN, *ENGINES, *SINGLE, *DRAFTS),
    "engine": (*PLUGIN, *ENGINES, *SINGLE),
    "recall-training": (*TRAINING, *NETWORK, "proofs/recall/[ls]*.py"),
    "recall-formats": (
        *BY_FORMAT,
        *NETWORK,
        "proofs/recall/language.py",
        "proofs/recall/judge.py",
        WEIGHTS,
    ),
    "recall": (
        *PLUGIN,
        "proofs/engine/case.py",
        "proofs/recall/*.py",
        WEIGHTS,
        *(f"!{path}" for path in (*TRAINING, *NETWORK, *BY_FORMAT)),
    ),
    "serve": (*PLUGIN, "proofs/serve/*.py"),
    "release-cluster": (*PLUGIN, "proofs/releases/*.py", "proofs/recall/language.py", WEIGHTS),
    "release": (*PLUGIN, "proofs/releases/*.py", "proofs/recall/language.py", ANSWERS),
    "lm-head": (*HEAD, "benchmarks/gpu/[lt]*.py", "tests/gpu/test_lm_head.py"),
    "marlin": ("tests/gpu/test_marlin.py", "benchmarks/gpu/timing.py"),
    "requantize": (
        "benchmarks/gpu/requantize.py",
        "files/checkpoint/spark_checkpoint/requantize/inside.py",
        "files/checkpoint/spark_checkpoint/requantize/gates.py",
    ),
    "experts": ("tests/gpu/test_experts.py",),
    **{
        name: (*PLUGIN, *ENGINES, *SINGLE, "proofs/engine/on_cpu.py")
        for name in ("steered", "prefixes")
    },
    "dflash": (*PLUGIN, *ENGINES, *DRAFTS, "proofs/engine/on_cpu.py"),
    "plain-models": (
        "tests/host/test_plain_models.py",
        "tests/published.py",
        "spark_deploy/planning/budget/*.py",
    ),
    "turboquant": ("files/image/spark_vllm/turboquant.py", "tests/gpu/test_turboquant.py"),
}
"""What each kind of result file rests on, ``!`` what it does not; the first kind that its name
begins with counts."""
_CONTRACT_ROOM = re.compile(r"^spark_contract\.\w+\.(?=\w+$)")


def digests(name: str, root: Path = ROOT) -> dict[str, str]:
    """Return the digest of every module that the result file ``name`` rests on, by its path."""
    kind = next(kind for kind in RAN if name.startswith(kind))
    paths: set[Path] = set()
    for pattern in RAN[kind]:
        found = {path for path in root.glob(pattern.removeprefix("!")) if path.is_file()}
        paths = paths - found if pattern.startswith("!") else paths | found
    return {str(path.relative_to(root)): digest(path) for path in sorted(paths)}


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
