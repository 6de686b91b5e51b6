"""Has the generated repositories of lab-tiny in the hub's store."""

from __future__ import annotations

import json
from pathlib import Path

from lab.content import content_key
from lab.hybrid import ensure_hybrid
from lab.paths import LabPaths
from lab.sixteen_bit import ensure_sixteen_bit

MODEL_DIR = Path(__file__).with_name("model")


def ensure_models(paths: LabPaths) -> None:
    """Have the repositories of the model, the hybrid that is made of them, and their original.

    Imported inside, not above: the lab's long-lived processes run without the model's files.
    """
    from lab.model.build import build

    key = content_key("model", trees=[MODEL_DIR])
    mark = paths.hub / ".model.json"
    if not mark.exists() or json.loads(mark.read_text()).get("key") != key:
        build(paths.hub)
        mark.write_text(json.dumps({"key": key}))
    ensure_hybrid(paths.hub)
    ensure_sixteen_bit(paths.hub)
