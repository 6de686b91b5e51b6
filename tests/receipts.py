import json
from collections.abc import Sequence
from typing import Any

_WRITTEN = {"tool_version": "0.1.0", "written_at": "2026-01-01T00:00:00Z"}


def source_receipt(digest: str = "e" * 64, files: Sequence[dict[str, Any]] = ()) -> str:
    fields = {"kind": "source", "digest": digest, "name": "org/repo", "commit": "c" * 40}
    return json.dumps({"schema_version": 1, **fields, "files": list(files), **_WRITTEN})


def checkpoint_receipt(base_dir: str = "/base", digest: str = "d" * 64) -> str:
    plan = {
        "schema_version": 1, "digest": digest, "name": "tree",
        "base": {"dir": base_dir, "revision": None}, "swap": [],
        "block_shape": [128, 128], "base_tensors": ["a"], "donor_unmatched": [],
        "donor_shapes": [], "extra": {},
        "mtp_tensors": [], "shared_experts": "keep", "head": "keep", "layout": "full",
        "out": "/srv/tree",
    }  # fmt: skip
    fields = {"kind": "checkpoint", "digest": digest, "recipe_version": 1, "plan": plan}
    fields |= {"tensors": 1, "report": {}, "files": []}
    return json.dumps({"schema_version": 1, **fields, **_WRITTEN})
