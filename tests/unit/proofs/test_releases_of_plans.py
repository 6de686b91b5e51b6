"""Planned releases on a CUDA machine: arguments, environment and judge."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spark_contract.release import Release

from proofs.releases import judge, trees
from proofs.releases.server import servers_of
from spark_deploy.config.settings.cluster import ClusterSettings
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from tests.unit.planning.plans import CATALOG, PAYLOAD, made_up_lock, settings_of


@pytest.fixture(scope="module")
def release() -> Release:
    chosen = ClusterSettings(hosts=("spark-1", "spark-2"))
    settings = dataclasses.replace(settings_of("large"), cluster=chosen)
    lock = made_up_lock(settings, CATALOG)
    return plan_host(Request("spark-1", settings, CATALOG, lock, PAYLOAD, {})).serve


def ranks(release: Release, work: Path, *, alone: bool = False) -> list[Any]:
    return servers_of(release, Path("/tree"), work, "two", devices=["0", "1"], alone=alone)


def test_ranks_get_planned_arguments_with_local_paths(release: Release, tmp_path: Path) -> None:
    head, worker = ranks(release, tmp_path)
    planned = [*release.engine.argv, *release.cluster.members[1].argv]
    kept = [word for word in planned if word in worker.argv]
    # Checkpoint, socket, head address and memory share are this machine's.
    assert len(planned) - len(kept) == 4
    assert worker.argv[0] == "/tree"
    assert worker.argv[worker.argv.index("--master-addr") + 1] == "127.0.0.1"
    assert "--headless" in worker.argv
    assert "--headless" not in head.argv
    assert head.socket != worker.socket
    (alone,) = ranks(release, tmp_path, alone=True)
    assert "--nnodes" not in alone.argv
    assert "NCCL_HOSTID" not in alone.env


def test_ranks_act_as_two_hosts(release: Release, tmp_path: Path) -> None:
    environments = [server.env for server in ranks(release, tmp_path)]
    for name in ("NCCL_HOSTID", "CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP"):
        assert len({env[name] for env in environments}) == 2
    for env in environments:
        assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "lo"
        assert env["NCCL_IB_DISABLE"] == "1"


def test_every_change_to_the_plan_is_recorded(release: Release, tmp_path: Path) -> None:
    for server in ranks(release, tmp_path):
        changes = " ".join(server.changed)
        planned = {**release.engine.env, **release.cluster.members[0].env}
        for key in set(server.env) - set(planned):
            own = key == "CUDA_VISIBLE_DEVICES" or server.env[key] == os.environ.get(key)
            assert own or key in changes


def test_doubled_experts_compute_the_same() -> None:
    source = np.random.default_rng(1)
    weights = {
        f"model.layers.0.mlp.experts.0.{part}.weight": source.normal(size=size).astype(np.float32)
        for part, size in (
            ("gate_proj", (256, 64)), ("up_proj", (256, 64)), ("down_proj", (64, 256)),
        )
    }  # fmt: skip
    doubled = trees.for_two(weights)

    def expert(tensors: dict[str, Any], x: Any) -> Any:
        gate, up, down = tensors.values()
        return down @ (np.maximum(gate @ x, 0) * (up @ x))

    x = source.normal(size=64)
    assert np.allclose(expert(weights, x), expert(doubled, x), rtol=1e-4)
    gate = next(iter(doubled.values()))
    # The halves must differ, so that confused scales are detected.
    assert not np.allclose(gate[:256], gate[256:])


ANSWER = {"kind": "record", "wanted": [5, 6], "tokens": [5, 6], "logprobs": [-0.01, -0.02],
          "margins": [6.0, 5.0]}  # fmt: skip
TWO = [[*("--nnodes", "2", "--node-rank", str(rank))] for rank in (0, 1)]


def served(**changed: Any) -> dict[str, Any]:
    return {
        "state": "served",
        "healthy_s": 60.0,
        "answers": [dict(ANSWER), dict(ANSWER)],
        "drafts": {"drafted": 100.0, "accepted": 80.0},
        "argv": TWO,
        "ways": {"via NET/": 8, "via P2P": 0, "via SHM": 0},
        "log": ["GPU KV cache size: 2,000 tokens, and more"],
        **changed,
    }


def verdicts(two: dict[str, Any]) -> dict[str, bool]:
    alone = served(log=["GPU KV cache size: 1,001 tokens, and more"])
    results = {"one-host": alone, "two-hosts-overlay": two, "two-hosts-full": served()}
    rows = [row for row in judge.judge_cluster(results) if row["cases"][0] == "two-hosts-overlay"]
    return {row["claim"].partition(": ")[2]: row["passed"] for row in rows}


def test_two_hosts_with_equal_answers_pass() -> None:
    assert len(verdicts(served())) == 5
    assert all(verdicts(served()).values())


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        ({"state": "died"}, "the plan's arguments and environment serve over HTTP"),
        ({"ways": {"via NET/": 8, "via P2P": 2, "via SHM": 0}}, "the planned ranks"),
        ({"ways": {"via NET/": 0, "via P2P": 0, "via SHM": 0}}, "the planned ranks"),
        ({"argv": [TWO[0], TWO[0]]}, "the planned ranks"),
        ({"answers": [{**ANSWER, "tokens": [5, 9]}] * 2}, "every record, passage and register"),
        ({"answers": [{**ANSWER, "tokens": [5, 9]}] * 2}, "token for token as one-host"),
        ({"answers": [{**ANSWER, "logprobs": [-0.01, -0.3]}] * 2}, "token for token as one-host"),
        ({"log": ["GPU KV cache size: 1,001 tokens"]}, "cache for twice the tokens"),
        ({"log": []}, "cache for twice the tokens"),
        ({"drafts": {"drafted": 100.0, "accepted": 60.0}}, "token for token as one-host"),
    ],
)
def test_two_hosts_with_differences_fail(changed: dict[str, Any], claim: str) -> None:
    failed = [name for name, passed in verdicts(served(**changed)).items() if not passed]
    assert any(name.startswith(claim) for name in failed)


OTHER_CHECKS = [
    {"check": str(number), "ok": True, "weight": "must", "detail": ""} for number in range(8)
]
DESCRIPTIONS = [{"wanted": "red blue", "said": "red blue"}, {"wanted": "blue", "said": "blue"}]
PICTURE_CHECK = {"check": "image", "ok": True, "weight": "must", "detail": ""}


def picture_verdicts(*, weight: str | None, read: bool = True, name: bool = False) -> list[bool]:
    """Return the verdicts for a severity of the picture check of a blind model."""
    image = {**PICTURE_CHECK, "ok": weight is None, "weight": weight or "must"}
    others = [{**entry, "ok": read} for entry in OTHER_CHECKS]
    white = [{**entry, "said": "white"} for entry in DESCRIPTIONS]
    warning = {**PICTURE_CHECK, "ok": False, "weight": "warn"}
    results = {
        "seeing": served(check=[*OTHER_CHECKS, PICTURE_CHECK], documents=DESCRIPTIONS),
        "seeing-other": served(check=[*OTHER_CHECKS, warning], documents=white),
        "seeing-blind": served(check=[*others, image], documents=DESCRIPTIONS if name else white),
    }
    return [row["passed"] for row in judge.judge_seeing(results)]


@pytest.mark.parametrize(
    ("blind", "passed"),
    [
        ({"weight": "must"}, True),
        ({"weight": None}, False),
        ({"weight": "warn"}, False),
        ({"weight": "must", "read": False}, False),
        ({"weight": "must", "name": True}, False),
    ],
)
def test_check_must_fail_for_a_blind_model(blind: dict[str, Any], passed: bool) -> None:
    assert all(picture_verdicts(**blind)) is passed


def comparison(chance: float) -> dict[str, Any]:
    """Return a record of ``spark-check`` with this probability of a word."""
    best = {"yes": math.log(chance), "no": math.log(1 - chance)}
    steps = [{"token": "yes", "best": best}]
    answers = [{"prompt": "Is it so?", "text": "yes", "steps": steps}]
    about = {"schema_version": 1, "release": "main-0123456789ab", "digest": "d", "asked_at": "now"}
    return {**about, "answers": answers}


NO_DRAFTS = {"drafted": 0.0, "accepted": 0.0}


@pytest.mark.parametrize(
    ("with_drafts", "without", "chance_in_bf16", "passed"),
    [
        ({}, {}, 0.8, True),
        ({"drafts": {"drafted": 100.0, "accepted": 10.0}}, {}, 0.8, False),
        ({"drafts": NO_DRAFTS}, {}, 0.8, False),
        ({}, {"drafts": {"drafted": 100.0, "accepted": 80.0}}, 0.8, False),
        ({"compared": comparison(0.7)}, {}, 0.8, False),
        ({}, {}, 0.9, False),  # a comparison must find a difference between formats
    ],
)
def test_plain_models_need_accepted_drafts_and_equal_answers(
    with_drafts: dict[str, Any], without: dict[str, Any], chance_in_bf16: float, passed: bool
) -> None:
    plain = served(check=OTHER_CHECKS, compared=comparison(0.9))
    results = {
        "plain-fp8": {**plain, **with_drafts},
        "plain-fp8-without": {**plain, "drafts": NO_DRAFTS, **without},
        "plain-bf16-without": {
            **plain,
            "drafts": NO_DRAFTS,
            "compared": comparison(chance_in_bf16),
        },
    }
    assert all(row["passed"] for row in judge.judge_plain(results)) is passed
