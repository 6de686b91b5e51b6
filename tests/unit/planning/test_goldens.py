"""Reviewed plans of every model and profile of the catalog, and texts; `make golden` rewrites them.

The default pair and the first plain model are complete. Other models are differences from these,
other profiles are differences from the default profile of their model.
"""

import difflib
import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.cli.plan_text import plan_text, shorten_argument
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.host import plan_document
from spark_deploy.plan.resolve import model_and_profile
from tests.unit.planning.plans import CATALOG, plan_with, settings_of, shipped_pairs, shipped_plan

GOLDEN = Path(__file__).parent / "golden"
DEFAULT = Settings()
PAIRS = shipped_pairs()
TEXTS = {
    "default": {},
    "discarded-base": {"checkpoint.layout": "full", "checkpoint.keep_base": False},
    "int4-checkpoint": {"checkpoint.source": "requantized", "requantize.iters": 0},
    "lowered-memory": {"engine.memory_fraction": 0.93},
    "portable": {},
}


@functools.cache
def plan_lines(model, profile):
    plan = shipped_plan(model, profile)
    if isinstance(plan, PlanError):
        return tuple(f"refused: {line}" for p in plan.problems for line in str(p).splitlines())
    data = plan_document(plan)
    engine = data["release"]["engine"]
    engine["argv"] = list(map(shorten_argument, engine["argv"]))
    for part, repeated in (
        ("preflight", ("downloads", "image_bytes", "disk_needed_bytes")),
        ("checkpoint", ("base",)),
    ):
        data[part] = {k: v for k, v in (data[part] or {}).items() if k not in repeated}
    donor = data["checkpoint"].get("donor")
    for locked in [*(source["locked"] for source in data["sources"]), *([donor] if donor else [])]:
        locked["files"] = f"{len(locked['files'])} files"
    built = data["checkpoint"].get("build", {})
    built |= {k: f"{len(v)} entries" for k, v in built.items() if isinstance(v, list)}
    digests = (f"{name} = {digest}" for digest, name in names_of(plan).items())
    return (*sorted(digests), *(with_names(line, plan) for line in flat_lines("", data)))


def names_of(plan):
    names = {plan.release.digest: "RELEASE", plan.image.digest: "IMAGE"}
    return names | ({plan.checkpoint.digest: "CHECKPOINT"} if plan.checkpoint else {})


def with_names(line, plan):
    for digest, name in names_of(plan).items():
        line = line.replace(digest, name).replace(digest[:12], name)
    return line


def flat_lines(path, value):
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
    if (model, profile) == (DEFAULT.model, DEFAULT.profile):
        return None
    if profile == "plain":
        first = next(name for name, other in PAIRS if other == "plain")
        return None if model == first else (first, "plain")
    own = profile != DEFAULT.profile and (model, DEFAULT.profile) in PAIRS
    return (model if own else DEFAULT.model, DEFAULT.profile)


def golden_of(model, profile):
    lines, base = plan_lines(model, profile), base_of(model, profile)
    if base is None or lines[0].startswith("refused"):
        return "\n".join([*lines, ""])
    return "\n".join([f"as {' with '.join(base)}, but", *changes(plan_lines(*base), lines), ""])


def changes(before, after):
    difference = difflib.unified_diff(before, after, n=0, lineterm="")
    return [line for line in difference if not line.startswith(("---", "+++", "@@"))]


def compare(name, text):
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "run `make golden` and review the difference"


@pytest.mark.parametrize(("model", "profile"), PAIRS, ids=[f"{m}--{p}" for m, p in PAIRS])
def test_plan_matches_its_reviewed_golden_file(model, profile):
    compare(f"{model}--{profile}.txt", golden_of(model, profile))


def text_of(case):
    settings = settings_of(**TEXTS[case])
    plan, (model, profile) = plan_with(settings), model_and_profile(settings, CATALOG)
    if case == "portable":
        profile = replace(profile, engine_mode=case)
        check = replace(plan.release.check, portable=True)
        plan = replace(plan, release=replace(plan.release, check=check))
    return [with_names(line, plan) for line in plan_text(plan, model, profile, verbose=True)]


@pytest.mark.parametrize("case", TEXTS)
def test_plan_text_matches_its_reviewed_golden_file(case):
    lines, base = text_of(case), text_of("default")
    changed = lines if case == "default" else ["as default, but", *changes(base, lines)]
    compare(f"text-{case}.txt", "\n".join([*changed, ""]))


def test_every_golden_file_belongs_to_a_plan():
    names = {f"{model}--{profile}.txt" for model, profile in PAIRS}
    names |= {f"text-{case}.txt" for case in TEXTS}
    stale = [path for path in GOLDEN.iterdir() if path.name not in names]
    if os.environ.get("GOLDEN") == "write":
        for path in stale:
            path.unlink()
        return
    assert not stale
