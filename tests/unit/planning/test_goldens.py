"""The plan of every model and profile, compared with a file that a reader can review.

``GOLDEN=write pytest tests/unit/planning/test_goldens.py`` (or ``make golden``) writes them anew.
"""

import itertools
import json
import os
from pathlib import Path

import pytest

from spark_deploy.checkout import CHECKOUT, catalog_names
from spark_deploy.errors import PlanError
from spark_deploy.lockfile.file import read_lock
from spark_deploy.planning.host import plan_host
from spark_deploy.planning.serving.release import document, release_files_of
from spark_deploy.planning.types import PayloadIdentity
from spark_deploy.settings.load import load_hosts

GOLDEN = Path(__file__).parent / "golden"
PAIRS = list(itertools.product(catalog_names("models"), catalog_names("profiles")))
PAYLOAD = PayloadIdentity("1" * 64, "2" * 64, 1, "files/checkpoint/requirements.txt")
LAB_IMAGES = {"stub_engine": "registry.lab:5000/lab/stub-engine:1"}


def plan_of(model: str, profile: str, tmp_path: Path, **more):
    overrides = {"model": model, "profile": profile, "images": LAB_IMAGES, **more}
    found = load_hosts({"spark": ["spark-1"]}, root=tmp_path, overrides=overrides)
    lock = read_lock(CHECKOUT / "tests/fixtures/lock.yml")
    return plan_host(found["spark-1"].settings, lock, PAYLOAD, host="spark-1")


def readable(plan) -> dict:
    """Leave out what repeats: file lists, and the parts of the release shown elsewhere."""
    data = document(plan)
    for source in [*data["sources"], (data["checkpoint"] or {}).get("base")]:
        if source:
            source["files"] = f"{len(source['files'])} files"
    return data


@pytest.mark.parametrize(("model", "profile"), PAIRS, ids=[f"{m}--{p}" for m, p in PAIRS])
def test_the_plan_of_every_pair_is_the_reviewed_one(model, profile, tmp_path):
    path = GOLDEN / f"{model}--{profile}.json"
    try:
        result = readable(plan_of(model, profile, tmp_path))
    except PlanError as error:
        result = {"refused": [str(problem) for problem in error.problems]}
    text = json.dumps(result, indent=1, sort_keys=True) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "run `make golden` and review the difference"


def test_no_golden_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {f"{m}--{p}" for m, p in PAIRS}


def test_v2_and_v2_tq_share_one_tree_and_one_image(tmp_path):
    one, other = (plan_of("qwen3.5-122b", profile, tmp_path) for profile in ("v2", "v2-tq"))
    assert one.checkpoint == other.checkpoint
    assert one.image == other.image
    assert one.serve.digest != other.serve.digest


def test_planning_twice_gives_the_same_digests(tmp_path):
    one, other = (plan_of("qwen3.5-122b", "v2", tmp_path) for _ in range(2))
    assert one == other
    assert one.serve.name == f"main-{one.serve.digest[:12]}"


@pytest.mark.parametrize(
    "change",
    [
        {"hub.endpoint": "http://mirror.example"},
        {"downloads.parallel": 9},
        {"hub.token": {"env": "TOKEN"}},
        {"ssh.user": "someone"},
        {"serve.api_key": {"file": "/key"}},
        {"serve.port": 9000, "serve.expose": "lan", "serve.max_body_mib": 1},
        {"disk.reserve_gib": 1},
        {"takeover": ["old"]},
    ],
)
def test_where_things_come_from_never_changes_what_is_served(change, tmp_path):
    plain_plan = plan_of("qwen3.5-122b", "v2", tmp_path)
    changed = plan_of("qwen3.5-122b", "v2", tmp_path, **change)
    assert changed.serve.digest == plain_plan.serve.digest
    assert changed.checkpoint.digest == plain_plan.checkpoint.digest
    assert changed.sources[0].digest == plain_plan.sources[0].digest


@pytest.mark.parametrize(
    "change",
    [
        {"engine.max_sequences": 2},
        {"serve.names": ["a", "b"]},
        {"engine.options": {"seed": 1}},
        {"engine.environment": {"VLLM_LOGGING_LEVEL": "DEBUG"}},
        {"memory.reserve_gib": 30},
    ],
)
def test_whatever_decides_how_it_runs_is_part_of_the_release(change, tmp_path):
    plain_plan = plan_of("qwen3.5-122b", "v2", tmp_path)
    changed = plan_of("qwen3.5-122b", "v2", tmp_path, **change)
    assert changed.serve.digest != plain_plan.serve.digest
    assert changed.checkpoint.digest == plain_plan.checkpoint.digest


def test_the_first_name_stays_while_model_and_profile_change(tmp_path):
    names = {
        plan_of(model, profile, tmp_path, **{"serve.names": ["assistant", "qwen"]}).serve.names
        for model, profile in [("qwen3.5-122b", "v2"), ("qwen3.5-35b", "base")]
    }
    assert names == {("assistant", "qwen")}


def test_no_secret_reference_reaches_the_release(tmp_path):
    plan = plan_of(
        "qwen3.5-122b",
        "v2",
        tmp_path,
        **{"serve.api_key": {"env": "MY_KEY"}, "hub.token": {"env": "MY_TOKEN"}},
    )
    assert "MY_KEY" not in json.dumps(plan.serve.release)
    assert "MY_TOKEN" not in json.dumps(plan.serve.release)


def test_the_server_waits_for_the_disks_of_its_tree_and_its_cache(tmp_path):
    paths = {"models_dir": "/disk-1/models", "cache_dir": "/disk-2/cache"}
    plan = plan_of("lab-tiny", "v2", tmp_path, paths=paths)
    drop_in = release_files_of(plan)[-1].content.decode()
    line = next(line for line in drop_in.splitlines() if line.startswith("RequiresMountsFor="))
    wanted = line.partition("=")[2].split()
    assert wanted[0] == plan.serve.tree_dir
    assert [path.split("/")[1] for path in wanted] == ["disk-1", "disk-2"]


@pytest.mark.parametrize(
    ("context", "configured_s", "planned_s"),
    [(262144, 120, 263), (65536, 120, 120), (262144, 600, 600)],
)
def test_the_longest_prompt_can_be_read_before_the_watch_calls_it_a_stall(
    context, configured_s, planned_s, tmp_path
):
    plan = plan_of(
        "qwen3.5-122b",
        "v2",
        tmp_path,
        **{"engine.max_context_tokens": context, "watch.stall_s": configured_s},
    )
    assert plan.serve.release["watch"]["stall_s"] == planned_s
