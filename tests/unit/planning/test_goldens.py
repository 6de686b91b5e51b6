"""Reviewed plans of every model and profile of the catalog; `make golden` rewrites them.

The default pair and the first plain model are complete. Other models are differences from these,
other profiles are differences from the default profile of their model.
"""

import difflib
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.host import document
from tests.unit.planning.plans import shipped

GOLDEN = Path(__file__).parent / "golden"
DEFAULT = Settings()
PLANS = {(model, profile): plan for model, profile, plan in shipped()}


@functools.cache
def plan_lines(model, profile):
    """Return a plan as sorted lines `path = value`, or the refusals."""
    plan = PLANS[model, profile]
    if isinstance(plan, PlanError):
        return tuple(f"refused: {line}" for p in plan.problems for line in str(p).splitlines())
    data = document(plan)
    # Repeated elsewhere in the plan or in the model's file.
    for part, repeated in (
        ("needs", ("downloads", "image_bytes", "disk_needed_bytes")),
        ("checkpoint", ("base",)),
    ):
        data[part] = {k: v for k, v in (data[part] or {}).items() if k not in repeated}
    donor = data["checkpoint"].get("donor")
    for locked in [*(source["locked"] for source in data["sources"]), *([donor] if donor else [])]:
        locked["files"] = f"{len(locked['files'])} files"
    built = data["checkpoint"].get("order", {})
    built |= {k: f"{len(v)} entries" for k, v in built.items() if isinstance(v, list)}
    # A digest is written once, and replaced by a name elsewhere.
    names = {plan.serve.digest: "RELEASE", plan.image.digest: "IMAGE"}
    if plan.checkpoint:
        names[plan.checkpoint.digest] = "CHECKPOINT"
    digests = (f"{name} = {digest}" for digest, name in names.items())
    return (*sorted(digests), *(with_names(line, names) for line in flat_lines("", data)))


def with_names(line, names):
    for digest, name in names.items():
        line = line.replace(digest, name).replace(digest[:12], name)
    return line


def flat_lines(path, value):
    """Yield a line for each value; an engine option and the values share a line."""
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from flat_lines(f"{path}.{key}" if path else str(key), value[key])
    elif isinstance(value, list) and value:
        for item in join_options(value):
            yield from flat_lines(f"{path}[]", item)
    else:
        yield f"{path} = {json.dumps(value)}"


def join_options(items):
    joined: list[Any] = []
    for item in items:
        option = joined[-1] if joined else None
        is_value = isinstance(item, str) and not item.startswith("--")
        if is_value and isinstance(option, str) and option.startswith("--"):
            joined[-1] = f"{option} {item}"
        else:
            joined.append(item)
    return joined


def base_of(model, profile):
    """Return the pair with which a golden is compared."""
    if (model, profile) == (DEFAULT.model, DEFAULT.profile):
        return None
    if profile == "plain":
        first = next(name for name, other in PLANS if other == "plain")
        return None if model == first else (first, "plain")
    return (DEFAULT.model if profile == DEFAULT.profile else model, DEFAULT.profile)


def golden_of(model, profile):
    lines, base = plan_lines(model, profile), base_of(model, profile)
    if base is None or lines[0].startswith("refused"):
        return "\n".join([*lines, ""])
    difference = difflib.unified_diff(plan_lines(*base), lines, n=0, lineterm="")
    changed = [line for line in difference if not line.startswith(("---", "+++", "@@"))]
    return "\n".join([f"as {' with '.join(base)}, but", *changed, ""])


@pytest.mark.parametrize(("model", "profile"), PLANS, ids=[f"{m}--{p}" for m, p in PLANS])
def test_plan_matches_reviewed_golden(model, profile):
    path, text = GOLDEN / f"{model}--{profile}.txt", golden_of(model, profile)
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "run `make golden` and review the difference"


def test_no_golden_is_stale():
    names = {f"{model}--{profile}.txt" for model, profile in PLANS}
    stale = [path for path in GOLDEN.iterdir() if path.name not in names]
    if os.environ.get("GOLDEN") == "write":
        for path in stale:
            path.unlink()
        return
    assert not stale
