"""Models that nobody here prepared: written by transformers, added by one command, proven.

With RESULTS=write what was seen goes to proofs/results/cpu/plain-models.json.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proofs.result_files import describe_run
from tests.labkit import CHECKOUT, SPARE, Guest, Site, guest_named
from tests.published import (
    DECODERS,
    DRAFTS,
    START_S,
    add,
    added,
    chat,
    embedded,
    ranked,
    site_of,
)

pytestmark = pytest.mark.engine

NAME = SPARE[0]
RESULTS = CHECKOUT / "proofs/results/cpu/plain-models.json"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return site_of(tmp_path_factory.mktemp("plain"), NAME)


@pytest.fixture(scope="module")
def guest(site: Site) -> Guest:
    return guest_named(NAME)


@pytest.fixture(scope="module")
def seen(guest: Guest) -> Iterator[list[dict[str, Any]]]:
    """Rows for the result file; a run of some models leaves the rows of the others."""
    rows: list[dict[str, Any]] = []
    yield rows
    if os.environ.get("RESULTS") != "write" or not rows:
        return
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    kept = {row["model"]: row for row in [*before, *rows]}
    told = {
        "command": "RESULTS=write pytest tests/host/test_plain_models.py",
        **describe_run("a guest of the virtual lab, x86_64 CPU"),
        "versions": {"vllm": proof_of(guest)["engine"]["version"]},
        "rows": sorted(kept.values(), key=lambda row: str(row["model"])),
    }
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")


def served(site: Site, model: str) -> float:
    """Have the guest serve a model; return how long the deploy took."""
    site.choose(model=model, profile="lab-plain")
    run = site.deploy(timeout_s=2 * START_S)
    assert run.exit_code == 0, run.stderr[-6000:]
    site.deploy().must_have_changed_nothing()
    return run.seconds


def log_of(guest: Guest) -> str:
    return guest.run(f"journalctl -u {guest.serving()[0]} -o cat")


def proof_of(guest: Guest) -> dict[str, Any]:
    found: dict[str, Any] = guest.json(f"cat /var/lib/spark/proofs/{guest.release()}.json")
    return found


def planned(site: Site) -> dict[str, Any]:
    done = site.look("plan", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)[0]
    return found


def weights_on(guest: Guest, tree: str) -> int:
    return int(guest.run(f"cat {tree}/*.safetensors | wc -c"))


def counted_tokens(guest: Guest) -> int:
    """Return how many tokens the engine has room for, by its log."""
    found = re.findall(r"KV cache size: ([\d,]+) tokens", log_of(guest))
    return int(found[-1].replace(",", ""))


def row_of(site: Site, guest: Guest, model: str, deploy_s: float) -> dict[str, Any]:
    """Return what a result file says of a served model, and hold plan and host to each other."""
    proof, plan = proof_of(guest), planned(site)
    assert proof["ok"]
    memory = plan["memory"]
    files = weights_on(guest, plan["sources"][0]["dir"])
    assert memory["weights_bytes"] == pytest.approx(files, rel=0.01)
    row = {
        "model": model,
        "architecture": DECODERS.get(model, ""),
        "files_bytes": files,
        "planned_weights_bytes": memory["weights_bytes"],
        "checks": sorted(one["name"] for one in proof["checks"] if one["ok"]),
        "warnings": sorted(one["name"] for one in proof["checks"] if not one["ok"]),
        "deploy_s": round(deploy_s),
    }
    if model in DECODERS:
        row |= {"planned_kv_tokens": memory["kv_tokens"], "engine_kv_tokens": counted_tokens(guest)}
        assert memory["unknown"] == []
        assert memory["kv_tokens"] == pytest.approx(row["engine_kv_tokens"], rel=0.01)
    return row


@pytest.mark.parametrize("model", DECODERS)
def test_a_decoder_is_added_by_one_command_and_proven(
    site: Site, guest: Guest, model: str, seen: list[dict[str, Any]]
) -> None:
    said = added(site, f"org/{model}")
    assert f"{model}.yml: written" in said
    assert f"UNPROVEN    nobody here ran org/{model}" in said
    deploy_s = served(site, model)

    assert chat(guest) == (200, "Paris")
    asked = {one["name"] for one in proof_of(guest)["checks"]}
    assert {"first answer", "answers", "stream", "parallel"} <= asked
    row = row_of(site, guest, model, deploy_s)
    log = log_of(guest)
    assert DECODERS[model] in log
    seen.append(row)


def test_an_embedder_is_added_by_one_command_and_proven_by_its_numbers(
    site: Site, guest: Guest, seen: list[dict[str, Any]]
) -> None:
    said = added(site, "org/tiny-embedder")
    text = (site.root / "catalog/models/tiny-embedder.yml").read_text()
    assert yaml.safe_load(text)["task"] == "embedding"
    deploy_s = served(site, "tiny-embedder")
    proof = proof_of(guest)
    assert proof["ok"], said
    asked = {one["name"]: one["detail"] for one in proof["checks"]}
    assert asked["embedding"].startswith("128 numbers")
    assert "first answer" not in asked
    assert embedded(guest, guest.names()[0]) == (200, [128, 128])
    seen.append(row_of(site, guest, "tiny-embedder", deploy_s))


def test_a_reranker_is_added_by_one_command_and_proven_by_an_order(
    site: Site, guest: Guest, seen: list[dict[str, Any]]
) -> None:
    added(site, "org/tiny-reranker")
    text = (site.root / "catalog/models/tiny-reranker.yml").read_text()
    assert yaml.safe_load(text)["task"] == "reranking"
    deploy_s = served(site, "tiny-reranker")
    asked = {one["name"] for one in proof_of(guest)["checks"]}
    assert "ranking" in asked
    assert "embedding" not in asked
    assert ranked(guest, guest.names()[0]) == (200, [1, 0])
    seen.append(row_of(site, guest, "tiny-reranker", deploy_s))


def test_a_cache_that_nobody_knows_is_planned_with_once_an_engine_counted_it(
    site: Site, guest: Guest
) -> None:
    said = added(site, "org/tiny-odd")
    assert "NOT KNOWN: KV cache of a token: layers of gpt2 are unknown" in said
    # Two turns are longer than what it learnt by heart.
    served(site, "tiny-odd")
    assert planned(site)["memory"]["kv_tokens"] is None
    done = site.look("update", "--missing", "--counted")
    assert done.returncode == 0, done.stderr
    memory = planned(site)["memory"]
    assert memory["kv_tokens"] == pytest.approx(counted_tokens(guest), rel=0.01)
    assert memory["counted_by"].startswith(f"{NAME}, {guest.release()}")
    site.deploy().must_have_changed_nothing()


def test_a_drafter_of_its_own_is_fetched_with_the_model_and_drafts(
    site: Site, guest: Guest, seen: list[dict[str, Any]]
) -> None:
    added(site, "org/tiny-qwen3")
    path = site.root / "catalog/models/tiny-qwen3.yml"
    path.write_text(
        path.read_text() + yaml.safe_dump({"changes": [{"set": {"speculation": DRAFTS}}]})
    )
    deploy_s = served(site, "tiny-qwen3")
    [drafter] = [
        one for one in planned(site)["sources"] if one["locked"]["repo"] == "org/tiny-draft"
    ]
    assert planned(site)["memory"]["drafter_bytes"] == pytest.approx(
        weights_on(guest, drafter["dir"]), rel=0.01
    )
    assert "/drafter" in " ".join(guest.argv())
    counted = re.search(
        r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", guest.metrics(), re.M
    )
    assert counted is not None
    assert float(counted[1]) > 0
    seen.append({
        "model": "tiny-qwen3 with drafts of tiny-draft",
        "planned_kv_tokens": planned(site)["memory"]["kv_tokens"],
        "engine_kv_tokens": counted_tokens(guest),
        "deploy_s": round(deploy_s),
    })  # fmt: skip


def test_the_way_back_leads_to_the_model_before(site: Site, guest: Guest) -> None:
    """To the model that served before, without a download; both must have been deployed."""
    before = guest.release()
    run = site.deploy(deploy="deploys/rollback.py")
    assert run.exit_code == 0, run.stderr[-4000:]
    assert guest.release() != before
    status, _ = guest.call("GET", "/v1/models")
    assert status == 200
    assert proof_of(guest)["ok"]


def test_a_repository_that_is_none_is_one_line(site: Site) -> None:
    code, said = add(site, "org/nothing-here")
    assert code == 1
    assert "Traceback" not in said
    assert not Path(site.root / "catalog/models/nothing-here.yml").exists()
