"""Every pair of the catalog: its plan as a difference that a reader can review.

One pair is written out whole: the model and profile of the defaults; of repositories served as
published the first, and the others as differences from it. The default profile of another
model is written as its difference from that, another profile as its difference from the default
profile of its model. ``GOLDEN=write pytest tests/unit/planning/test_goldens.py`` (or ``make
golden``) writes them anew.
"""

import difflib
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.host import document
from tests.unit.planning.plans import shipped

GOLDEN = Path(__file__).parent / "golden"
DEFAULT = Settings()
PLANS = {(model, profile): found for model, profile, found in shipped()}


@functools.cache
def plan_lines(model: str, profile: str) -> tuple[str, ...]:
    """Return a plan as sorted lines `path = value`, or as the reasons why there is none."""
    plan = PLANS[model, profile]
    if isinstance(plan, PlanError):
        return tuple(f"refused: {line}" for p in plan.problems for line in str(p).splitlines())
    data = document(plan)
    # What repeats another part of the plan, or the model's own file.
    for part, repeated in (
        ("needs", ("downloads", "image_bytes", "disk_needed_bytes")),
        ("checkpoint", ("base",)),
    ):
        data[part] = {k: v for k, v in (data[part] or {}).items() if k not in repeated}
    donor = data["checkpoint"].get("donor")
    for locked in [*(one["locked"] for one in data["sources"]), *([donor] if donor else [])]:
        locked["files"] = f"{len(locked['files'])} files"
    built = data["checkpoint"].get("order", {})
    built |= {k: f"{len(v)} entries" for k, v in built.items() if isinstance(v, list)}
    # A digest is written once, where it is made; elsewhere it is a name.
    names = {plan.serve.digest: "RELEASE", plan.image.digest: "IMAGE"}
    if plan.checkpoint:
        names[plan.checkpoint.digest] = "CHECKPOINT"
    digests = (f"{name} = {digest}" for digest, name in names.items())
    return (*sorted(digests), *(named(line, names) for line in flat("", data)))


def named(line: str, names: dict[str, str]) -> str:
    for digest, name in names.items():
        line = line.replace(digest, name).replace(digest[:12], name)
    return line


def flat(path: str, value: Any) -> Iterator[str]:
    """Yield a line for each value, an option of the engine beside its values."""
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from flat(f"{path}.{key}" if path else str(key), value[key])
    elif isinstance(value, list) and value:
        for item in options_joined(value):
            yield from flat(f"{path}[]", item)
    else:
        yield f"{path} = {json.dumps(value)}"


def options_joined(items: list[Any]) -> list[Any]:
    joined: list[Any] = []
    for item in items:
        option = joined[-1] if joined else None
        is_value = isinstance(item, str) and not item.startswith("--")
        if is_value and isinstance(option, str) and option.startswith("--"):
            joined[-1] = f"{option} {item}"
        else:
            joined.append(item)
    return joined


def base_of(model: str, profile: str) -> tuple[str, str] | None:
    """Return the pair that this one is written as a difference from."""
    if (model, profile) == (DEFAULT.model, DEFAULT.profile):
        return None
    if profile == "plain":
        # Those served as published differ little, and all from the others much.
        first = next(name for name, served in PLANS if served == "plain")
        return None if model == first else (first, "plain")
    return (DEFAULT.model if profile == DEFAULT.profile else model, DEFAULT.profile)


def golden_of(model: str, profile: str) -> str:
    lines, base = plan_lines(model, profile), base_of(model, profile)
    if base is None or lines[0].startswith("refused"):
        return "\n".join([*lines, ""])
    # Without the places of the lines: a line more elsewhere is no difference here.
    marked = difflib.unified_diff(plan_lines(*base), lines, n=0, lineterm="")
    changed = [line for line in marked if not line.startswith(("---", "+++", "@@"))]
    return "\n".join([f"as {' with '.join(base)}, but", *changed, ""])


@pytest.mark.parametrize(("model", "profile"), PLANS, ids=[f"{m}--{p}" for m, p in PLANS])
def test_the_plan_of_every_pair_is_the_reviewed_one(model, profile):
    path, text = GOLDEN / f"{model}--{profile}.txt", golden_of(model, profile)
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "run `make golden` and review the difference"


def test_no_golden_is_left_over():
    found = {path.name for path in GOLDEN.iterdir()}
    if os.environ.get("GOLDEN") == "write":
        for name in found - {f"{m}--{p}.txt" for m, p in PLANS}:
            (GOLDEN / name).unlink()
        found = {path.name for path in GOLDEN.iterdir()}
    assert found == {f"{m}--{p}.txt" for m, p in PLANS}


@pytest.mark.parametrize(("model", "profile"), PLANS, ids=[f"{m}--{p}" for m, p in PLANS])
def test_no_pair_is_refused_for_want_of_a_lock_or_an_image(model, profile):
    """Such a golden would say nothing of the pair."""
    refusals = [line for line in plan_lines(model, profile) if line.startswith("refused")]
    assert not [line for line in refusals if "not locked" in line or "image role" in line]
