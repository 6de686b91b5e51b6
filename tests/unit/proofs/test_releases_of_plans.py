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


def test_ranks_act_as_two_hosts(release: Release, tmp_path: Path) -> None:
    head, worker = ranks(release, tmp_path)
    assert head.env["NCCL_HOSTID"] != worker.env["NCCL_HOSTID"]
    assert (head.env["CUDA_VISIBLE_DEVICES"], worker.env["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert (head.env["VLLM_HOST_IP"], worker.env["VLLM_HOST_IP"]) == ("127.0.0.1", "127.0.0.2")
    assert head.env["GLOO_SOCKET_IFNAME"] == head.env["NCCL_SOCKET_IFNAME"] == "lo"
    assert head.env["NCCL_IB_DISABLE"] == "1"


def test_every_change_to_the_plan_is_recorded(release: Release, tmp_path: Path) -> None:
    for server in ranks(release, tmp_path):
        changes = " ".join(server.changed)
        planned = {**release.engine.env, **release.cluster.members[0].env}
        for key in set(server.env) - set(planned):
            own = key == "CUDA_VISIBLE_DEVICES" or server.env[key] == os.environ.get(key)
            assert own or key in changes


def test_single_server_has_no_cluster_arguments(release: Release, tmp_path: Path) -> None:
    (server,) = ranks(release, tmp_path, alone=True)
    assert "--nnodes" not in server.argv
    assert "NCCL_HOSTID" not in server.env


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


FINDINGS = [
    {"check": str(number), "ok": True, "weight": "must", "detail": ""} for number in range(8)
]
SAID = [{"wanted": "red blue", "said": "red blue"}, {"wanted": "blue", "said": "blue"}]
SEEN = {"check": "image", "ok": True, "weight": "must", "detail": ""}


def eyes(*, weight: str | None, read: bool = True, name: bool = False) -> list[bool]:
    """Return the verdicts for a severity of the picture check of a blind model."""
    image = {**SEEN, "ok": weight is None, "weight": weight or "must"}
    others = [{**entry, "ok": read} for entry in FINDINGS]
    answers = SAID if name else [{**entry, "said": "white"} for entry in SAID]
    bad = served(check=[*others, image], documents=answers)
    good = served(check=[*FINDINGS, SEEN], documents=SAID)
    other = served(check=[*FINDINGS, {**SEEN, "ok": False, "weight": "warn"}], documents=[
        {**entry, "said": "white"} for entry in SAID])  # fmt: skip
    results = {"seeing": good, "seeing-other": other, "seeing-blind": bad}
    return [row["passed"] for row in judge.judge_seeing(results)]


def test_check_must_fail_for_a_blind_model() -> None:
    assert all(eyes(weight="must"))
    assert not all(eyes(weight=None))
    assert not all(eyes(weight="warn"))
    assert not all(eyes(weight="must", read=False))
    assert not all(eyes(weight="must", name=True))


def asked(chance: float) -> dict[str, Any]:
    """Return a record of ``spark-check`` with this probability of a word."""
    best = {"yes": math.log(chance), "no": math.log(1 - chance)}
    steps = [{"token": "yes", "best": best}]
    answers = [{"prompt": "Is it so?", "text": "yes", "steps": steps}]
    about = {"schema_version": 1, "release": "main-0123456789ab", "digest": "d", "asked_at": "now"}
    return {**about, "answers": answers}


def test_plain_models_need_accepted_drafts_and_equal_answers() -> None:
    check = {"check": FINDINGS, "compared": asked(0.9)}
    none = {"drafted": 0.0, "accepted": 0.0}
    few = {"drafted": 100.0, "accepted": 10.0}

    drafted = {"drafted": 100.0, "accepted": 80.0}

    def rows(own: dict[str, Any], without: dict[str, Any], other: float = 0.8) -> list[bool]:
        results = {
            "plain-fp8": served(**{**check, "drafts": drafted, **own}),
            "plain-fp8-without": served(**{**check, "drafts": none, **without}),
            "plain-bf16-without": served(**check, drafts=none),
        }
        results["plain-bf16-without"]["compared"] = asked(other)
        return [row["passed"] for row in judge.judge_plain(results)]

    assert all(rows({}, {}))
    assert not all(rows({"drafts": few}, {}))
    assert not all(rows({"drafts": none}, {}))
    assert not all(rows({}, {"drafts": drafted}))
    assert not all(rows({"compared": asked(0.7)}, {}))
    # A comparison must find a difference between formats.
    assert not all(rows({}, {}, other=0.9))
