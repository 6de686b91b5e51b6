"""Has the generated repositories of lab-tiny in the hub's store."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lab.content import content_key
from lab.hybrid import ensure_hybrid
from lab.paths import LabPaths
from lab.shell import run

MODEL_DIR = Path(__file__).with_name("model")
_CHECKOUT = Path(__file__).parent.parent


def ensure_models(paths: LabPaths, *, trained: bool) -> None:
    """Have the repositories of the model, and the hybrid that is made of them."""
    _ensure_sources(paths, trained=trained)
    ensure_hybrid(paths.hub)


def _ensure_sources(paths: LabPaths, *, trained: bool) -> None:
    """Have base and donor; weights that answer are made by the real engine's Python.

    Untrained weights have the same names, shapes and files, and are enough where the stub engine
    answers. Repositories that are already trained are never replaced by untrained ones.
    """
    key = content_key("model", trees=[MODEL_DIR])
    mark = paths.hub / ".model.json"
    made = json.loads(mark.read_text()) if mark.exists() else {"key": "", "trained": False}
    if made["key"] == key and (made["trained"] or not trained):
        return
    trained = trained or bool(made["trained"])
    words = [
        "-m",
        "lab.model",
        "build",
        "--out",
        str(paths.hub),
        "--cache",
        str(paths.cache / "model"),
    ]
    if trained:
        argv = [sys.executable, "-m", "lab.engine", "run", *words]
    else:
        argv = [sys.executable, *words, "--untrained"]
    env = {"PYTHONPATH": str(_CHECKOUT), "SPARK_LAB_ENGINE_BIND": str(paths.state)}
    run(argv, cwd=_CHECKOUT, env={**os.environ, **env}, show=True)
    mark.write_text(json.dumps({"key": key, "trained": trained}))
