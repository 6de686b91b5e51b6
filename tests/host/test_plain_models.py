import json
import os
import re
from typing import Any

import pytest
import yaml

from proofs.result_files import describe_run
from tests.labkit import CHECKOUT, SPARE, guest_named
from tests.published import DECODERS, DRAFTS, START_S, add_or_fail, chat, embed, fresh_site, rerank

pytestmark = pytest.mark.engine

NAME = SPARE[0]
RESULTS = CHECKOUT / "proofs/results/cpu/plain-models.json"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return fresh_site(tmp_path_factory.mktemp("plain"), NAME)


@pytest.fixture(scope="module")
def guest(site):
    return guest_named(NAME)


@pytest.fixture(scope="module")
def rows(guest):
    rows: list[dict[str, Any]] = []
    yield rows
    if os.environ.get("RESULTS") != "write" or not rows:
        return
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    kept = {row["model"]: row for row in [*before, *rows]}
    document = {
        "command": "RESULTS=write pytest tests/host/test_plain_models.py",
        **describe_run("a guest of the virtual lab, x86_64 CPU"),
        "versions": {"vllm": guest.proof()["engine"]["version"]},
        "rows": sorted(kept.values(), key=lambda row: str(row["model"])),
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def deploy_model(site, model):
    site.choose(model=model, profile="lab-plain")
    run = site.deploy(timeout_s=2 * START_S).assert_succeeded()
    site.deploy().assert_unchanged()
    return run.seconds


def log_of(guest):
    return guest.run(f"journalctl -u {guest.serving()[0]} -o cat")


def checks_of(guest):
    proof = guest.proof()
    assert proof["ok"], proof
    return {check["name"]: check["detail"] for check in proof["checks"]}


def planned(site):
    result = site.cli("plan", "--json")
    assert result.returncode == 0, result.stderr
    plan: dict[str, Any] = json.loads(result.stdout)[0]
    return plan


def weights_on(guest, tree):
    return int(guest.run(f"cat {tree}/*.safetensors | wc -c"))


def counted_tokens(guest):
    counts = re.findall(r"KV cache size: ([\d,]+) tokens", log_of(guest))
    return int(counts[-1].replace(",", ""))


def row_of(site, guest, model, deploy_s):
    proof, plan = guest.proof(), planned(site)
    assert proof["ok"]
    memory = plan["memory"]
    files = weights_on(guest, plan["sources"][0]["dir"])
    assert memory["weights_bytes"] == pytest.approx(files, rel=0.01)
    row = {
        "model": model,
        "architecture": DECODERS.get(model, ""),
        "files_bytes": files,
        "planned_weights_bytes": memory["weights_bytes"],
        "checks": sorted(check["name"] for check in proof["checks"] if check["ok"]),
        "warnings": sorted(check["name"] for check in proof["checks"] if not check["ok"]),
        "deploy_s": round(deploy_s),
    }
    if model in DECODERS:
        row |= {"planned_kv_tokens": memory["kv_tokens"], "engine_kv_tokens": counted_tokens(guest)}
        assert memory["unknown"] == []
        assert memory["kv_tokens"] == pytest.approx(row["engine_kv_tokens"], rel=0.01)
    return row


def task_of(site, model):
    text = (site.root / f"catalog/models/{model}.yml").read_text()
    return str(yaml.safe_load(text)["task"])


@pytest.mark.parametrize("model", DECODERS)
def test_added_decoder_model_passes_its_check(site, guest, model, rows):
    add_or_fail(site, f"org/{model}")
    deploy_s = deploy_model(site, model)

    assert chat(guest) == (200, "Paris")
    assert {"first answer", "answers", "stream", "parallel"} <= checks_of(guest).keys()
    assert DECODERS[model] in log_of(guest)
    rows.append(row_of(site, guest, model, deploy_s))


def test_added_embedding_model_passes_its_check(site, guest, rows):
    add_or_fail(site, "org/tiny-embedder")
    assert task_of(site, "tiny-embedder") == "embedding"
    deploy_s = deploy_model(site, "tiny-embedder")
    checks = checks_of(guest)
    assert checks["embedding"].startswith("128 dimensions")
    assert "first answer" not in checks
    assert embed(guest, guest.names()[0]) == (200, [128, 128])
    rows.append(row_of(site, guest, "tiny-embedder", deploy_s))


def test_added_reranker_passes_its_check(site, guest, rows):
    add_or_fail(site, "org/tiny-reranker")
    assert task_of(site, "tiny-reranker") == "reranking"
    deploy_s = deploy_model(site, "tiny-reranker")
    checks = checks_of(guest)
    assert "ranking" in checks
    assert "embedding" not in checks
    assert rerank(guest, guest.names()[0]) == (200, [1, 0])
    rows.append(row_of(site, guest, "tiny-reranker", deploy_s))


def test_plan_uses_the_kv_cache_size_that_the_engine_reported(site, guest):
    add_or_fail(site, "org/tiny-odd")
    deploy_model(site, "tiny-odd")
    assert planned(site)["memory"]["kv_tokens"] is None
    result = site.cli("update", "--missing", "--from-hosts")
    assert result.returncode == 0, result.stderr
    memory = planned(site)["memory"]
    assert memory["kv_tokens"] == pytest.approx(counted_tokens(guest), rel=0.01)
    assert memory["measured_by"].startswith(f"{NAME}, {guest.release()}")
    site.deploy().assert_unchanged()


def test_deploy_downloads_the_drafter_and_the_engine_accepts_its_draft_tokens(site, guest, rows):
    add_or_fail(site, "org/tiny-qwen3")
    path = site.root / "catalog/models/tiny-qwen3.yml"
    path.write_text(
        path.read_text() + yaml.safe_dump({"changes": [{"set": {"speculation": DRAFTS}}]})
    )
    deploy_s = deploy_model(site, "tiny-qwen3")
    plan = planned(site)
    [folder] = [
        source["dir"] for source in plan["sources"] if source["locked"]["repo"] == "org/tiny-draft"
    ]
    drafter_bytes = weights_on(guest, folder)
    assert plan["memory"]["drafter_bytes"] == pytest.approx(drafter_bytes, rel=0.01)
    assert "/drafter" in " ".join(guest.argv())
    counted = re.search(
        r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", guest.metrics(), re.M
    )
    assert float(counted[1]) > 0
    rows.append({
        "model": "tiny-qwen3 with drafts of tiny-draft",
        "planned_kv_tokens": plan["memory"]["kv_tokens"],
        "engine_kv_tokens": counted_tokens(guest),
        "deploy_s": round(deploy_s),
    })  # fmt: skip
