"""What the plan of a host promises, whatever the catalog holds."""

import dataclasses
from typing import Any

import pytest
from spark_contract.documents import text_of

from spark_deploy.plan.host import image_after_bytes
from spark_deploy.plan.release import release_files_of
from tests.unit.planning.plans import plan_of


def test_v2_and_v2_tq_share_one_tree_and_one_image():
    one, other = (plan_of("large", profile) for profile in ("v2", "v2-tq"))
    assert one.checkpoint == other.checkpoint
    assert one.image == other.image
    assert one.serve.digest != other.serve.digest


def test_planning_twice_gives_the_same_digests():
    one, other = (plan_of("large", "v2") for _ in range(2))
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
def test_where_things_come_from_never_changes_what_is_served(change):
    plain_plan = plan_of("large", "v2")
    changed = plan_of("large", "v2", **change)
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
def test_whatever_decides_how_it_runs_is_part_of_the_release(change):
    plain_plan = plan_of("large", "v2")
    changed = plan_of("large", "v2", **change)
    assert changed.serve.digest != plain_plan.serve.digest
    assert changed.checkpoint.digest == plain_plan.checkpoint.digest


def test_the_first_name_stays_while_model_and_profile_change():
    names = {
        plan_of(model, profile, **{"serve.names": ["assistant", "qwen"]}).serve.names
        for model, profile in [("large", "v2"), ("small", "base")]
    }
    assert names == {("assistant", "qwen")}


def test_no_secret_reference_reaches_the_release():
    plan = plan_of(
        "large",
        "v2",
        **{"serve.api_key": {"env": "MY_KEY"}, "hub.token": {"env": "MY_TOKEN"}},
    )
    assert "MY_KEY" not in text_of(plan.serve)
    assert "MY_TOKEN" not in text_of(plan.serve)


def test_the_compile_cache_is_kept_for_base_image_and_drafts_whatever_the_plugin():
    def cache_of(profile: str, **more: Any) -> str:
        return plan_of("large", profile, **more).cache_dir

    ours, stock = plan_of("large", "v2"), plan_of("large", "v2-native")
    assert ours.image.tag != stock.image.tag
    assert ours.cache_dir == stock.cache_dir
    assert cache_of("base") != ours.cache_dir  # no drafts
    assert cache_of("v2", images={"engine": "registry.example/other:1"}) != ours.cache_dir


def test_an_unpacked_engine_image_fits_its_disk_estimate():
    # vllm/vllm-openai:v0.31.0: 11.0 GB compressed, 26.4 GB unpacked.
    image = dataclasses.replace(plan_of("small", "v2").image, size_bytes=11_000_000_000)
    assert image_after_bytes(image) >= 26_400_000_000


def test_the_server_waits_for_the_disks_of_its_tree_and_its_cache():
    paths = {"models_dir": "/disk-1/models", "cache_dir": "/disk-2/cache"}
    plan = plan_of("small", "v2", paths=paths)
    drop_in = release_files_of(plan)[-1].content.decode()
    line = next(line for line in drop_in.splitlines() if line.startswith("RequiresMountsFor="))
    wanted = line.partition("=")[2].split()
    assert wanted[0] == plan.serve.tree.path
    assert [path.split("/")[1] for path in wanted] == ["disk-1", "disk-2", "run"]


@pytest.mark.parametrize(
    ("context", "configured_s", "planned_s"),
    [(262144, 120, 263), (65536, 120, 120), (262144, 600, 600)],
)
def test_the_longest_prompt_can_be_read_before_the_watch_calls_it_a_stall(
    context, configured_s, planned_s
):
    plan = plan_of(
        "large",
        "v2",
        **{"engine.max_context_tokens": context, "watch.stall_s": configured_s},
    )
    assert plan.serve.watch.stall_s == planned_s
