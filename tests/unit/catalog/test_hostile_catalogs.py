import dataclasses
import json
import shutil
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from spark_deploy.cli.share import read_shared
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import to_yaml_data
from spark_deploy.lock.resolve import read_lock, write_lock
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from tests.unit.hostile import accepted_or_refused, changed_in_one_place, tries
from tests.unit.planning.plans import PAYLOAD, made_up_lock, settings_of
from tests.unit.planning.test_plain import METADATA

pytestmark = pytest.mark.slow

MODEL: dict[str, Any] = {
    "kind": "plain", "summary": "s", "choose_when": "c", "repository": "org/dense",
    "revision": "main", "task": "chat", "vision": True, "audio": True, "leave_out": ["*.gguf"],
    "memory": {"runtime_gib": 2, "weights_factor": 1.5}, "imported": ["somewhere"],
    "parsers": {"reasoning": "qwen3", "tool_call": "hermes"},
    "check": {"questions": [{"prompt": "p", "expect": "e", "max_tokens": 8}], "copy": ["abc"]},
    "adapters": {"law": {"repository": "org/lora", "rank": 16}},
    "changes": [{"when": {"vision": {"is": False}}, "set": {"limits": {"max_sequences": 2}}}],
}  # fmt: skip
PROFILE: dict[str, Any] = {
    "based_on": "base", "summary": "s", "choose_when": "c",
    "speculation": {"method": "ngram", "tokens": 3, "longest_match": 4, "shortest_match": 2},
    "kv_cache": {"dtype": "fp8", "size_gib": 4}, "options": {"block-size": 32, "seed": 1},
    "limits": {"max_sequences": 4, "max_batched_tokens": 8192, "memory_fraction": 0.7},
    "environment": {"A_B": "c"}, "check": {"acceptance_floor": 0.2, "log_required": ["x"]},
    "load_format": "auto", "prefix_caching": True, "vision": False,
}  # fmt: skip
SHARED: dict[str, Any] = {
    "shared": 1, "name": "dense", "model": MODEL, "profile_name": "mine", "profile": PROFILE,
    "sources": {"org/dense": {"revision": "main", "commit": "1" * 40}},
    "images": {"a/b": "sha256:1"},
    "proof": {"level": "full", "ok": True, "checked_at": "now", "engine": "1", "portable": False,
              "stubbed": [], "checks": {"answers": True}},
}  # fmt: skip
READ = to_yaml_data(METADATA, include_nulls=False)


def encoded(document):
    return json.dumps(document).encode()


@pytest.fixture
def own(tmp_path):
    for kind, names in {"models": (), "profiles": ("base.yml",)}.items():
        (tmp_path / "ours/catalog" / kind).mkdir(parents=True)
        (tmp_path / "mine/catalog" / kind).mkdir(parents=True)
        for name in names:
            ours = CHECKOUT / "tests/fixtures/checkout/catalog" / kind / name
            shutil.copy(ours, tmp_path / "ours/catalog" / kind / name)
    engines = CHECKOUT / "catalog/engines.yml"
    shutil.copy(engines, tmp_path / "ours/catalog/engines.yml")
    rails = yaml.safe_load((CHECKOUT / "catalog/guard_rails.yml").read_text("utf-8"))
    few = json.dumps({"rails": rails["rails"][:3]})
    (tmp_path / "ours/catalog/guard_rails.yml").write_text(few)
    shutil.copytree(CHECKOUT / "schema", tmp_path / "ours/schema")
    return tmp_path


@pytest.fixture
def locked(own):
    lock = made_up_lock(settings_of(), read_catalog(CHECKOUT / "tests/fixtures/checkout"))
    write_lock(own / "lock.yml", lock)
    return (own / "lock.yml").read_text("utf-8")


def check_plan(own, model, profile, metadata):
    for kind, name, document in (("models", "dense", model), ("profiles", "mine", profile)):
        path = own / f"mine/catalog/{kind}/{name}.yml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with accepted_or_refused(in_one_line=True):
        catalog = read_catalog(own / "ours", user_dir=own / "mine")
        chosen = dataclasses.replace(settings_of(), model="dense", profile="mine")
        catalog.model("dense")
        catalog.profile("mine", "dense")
        lock = made_up_lock(chosen, catalog)
        repo_metadata = {
            repo: dataclasses.replace(metadata, repository=repo, commit=source.commit)
            for repo, source in lock.sources.items()
        }
        lock = dataclasses.replace(lock, repo_metadata=repo_metadata)
        plan_host(Request("a", chosen, catalog, lock, PAYLOAD))


def test_valid_documents_are_accepted(own):
    check_plan(own, MODEL, {**PROFILE, "speculation": None}, METADATA)
    catalog = read_catalog(own / "ours", user_dir=own / "mine")
    assert catalog.model("dense").adapters["law"].rank == 16
    assert catalog.profile("mine", "dense").kv_cache.dtype == "fp8"
    assert read_shared(SHARED, "x").profile_name == "mine"


@tries(60)
@given(text=changed_in_one_place(encoded(MODEL)))
@example(text=encoded({**MODEL, "memory": {"runtime_gib": 10**30}}))
@example(text=encoded({**MODEL, "changes": [{"set": {"limits": None}}]}))
@example(text=encoded({**MODEL, "adapters": {"law": {"repository": "org/dense", "rank": 1}}}))
def test_every_model_file_yields_a_plan_or_is_rejected(own, text):
    check_plan(own, json.loads(text), {**PROFILE, "speculation": None}, METADATA)


@tries(60)
@given(text=changed_in_one_place(encoded(PROFILE)))
@example(text=encoded({**PROFILE, "options": {"block-size": 10**30}}))
@example(text=encoded({**PROFILE, "options": {"block-size": 0}}))
@example(text=encoded({**PROFILE, "kv_cache": {"size_gib": 1e-9}}))
def test_every_profile_file_yields_a_plan_or_is_rejected(own, text):
    check_plan(own, {**MODEL, "adapters": {}}, json.loads(text), METADATA)


@tries(60)
@given(text=changed_in_one_place(encoded(READ)), bits=st.sampled_from(["auto", "fp8"]))
@example(
    text=encoded({**READ, "cache": [{"kind": "full", "layers": 1, "token_bytes": 1}]}), bits="fp8"
)
@example(text=encoded({**READ, "cache": [{"kind": "full", "layers": 1}]}), bits="auto")
@example(text=encoded({**READ, "weights": {"BF16": 2**62}}), bits="auto")
def test_every_lock_file_yields_a_plan_or_is_rejected(own, locked, text, bits):
    path = own / "lock.yml"
    data = {**yaml.safe_load(locked), "repo_metadata": {"org/dense": json.loads(text)}}
    path.write_text(json.dumps(data))
    with accepted_or_refused(in_one_line=True):
        metadata = read_lock(path).repo_metadata["org/dense"]
        profile = {**PROFILE, "kv_cache": {"dtype": bits}}
        check_plan(own, {**MODEL, "adapters": {}}, profile, metadata)


@tries(60)
@given(text=changed_in_one_place(encoded(SHARED)))
def test_any_shared_file_is_read_or_rejected(text):
    with accepted_or_refused(in_one_line=True):
        read_shared(json.loads(text), "x.yml")
