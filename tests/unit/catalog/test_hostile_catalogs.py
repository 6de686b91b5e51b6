"""Catalog files, shared files and locks with anything in one place: planned or refused in lines."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spark_deploy.cli.share import read_shared
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import typed
from spark_deploy.config.errors import SparkError
from spark_deploy.lock.file import read_lock, write_lock
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from tests.unit.examples import examples
from tests.unit.hostile import changed_in_one_place
from tests.unit.planning.plans import PAYLOAD, made_up_lock, settings_of
from tests.unit.planning.test_plain import ANATOMY

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
READ = typed(ANATOMY, nulls=False)
HOSTILE = settings(
    max_examples=examples(60), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def text(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A catalog of few files, so that it is read in no time, and a place for one's own."""
    for kind, names in {"models": (), "profiles": ("base.yml",)}.items():
        (tmp_path / "ours/catalog" / kind).mkdir(parents=True)
        (tmp_path / "mine/catalog" / kind).mkdir(parents=True)
        for name in names:
            ours = CHECKOUT / "tests/fixtures/checkout/catalog" / kind / name
            shutil.copy(ours, tmp_path / "ours/catalog" / kind / name)
    engines = CHECKOUT / "catalog/engines.yml"
    shutil.copy(engines, tmp_path / "ours/catalog/engines.yml")
    # Every rail is read again for each example: a few of them are as good as all.
    rails = yaml.safe_load((CHECKOUT / "catalog/guard_rails.yml").read_text("utf-8"))
    few = json.dumps({"rails": rails["rails"][:3]})
    (tmp_path / "ours/catalog/guard_rails.yml").write_text(few)
    shutil.copytree(CHECKOUT / "schema", tmp_path / "ours/schema")
    return tmp_path


@pytest.fixture
def locked(own: Path) -> str:
    """The lock file of what the settings name."""
    lock = made_up_lock(settings_of(), read_catalog(CHECKOUT / "tests/fixtures/checkout"))
    write_lock(own / "lock.yml", lock)
    return (own / "lock.yml").read_text("utf-8")


def planned(own: Path, model: dict[str, Any], profile: dict[str, Any], anatomy: Any) -> None:
    """Plan with files as they are; what is refused is refused in single lines."""
    for kind, name, said in (("models", "dense", model), ("profiles", "mine", profile)):
        path = own / f"mine/catalog/{kind}/{name}.yml"
        path.write_text(yaml.safe_dump(said), encoding="utf-8")
    try:
        catalog = read_catalog(own / "ours", own=own / "mine")
        asked = dataclasses.replace(settings_of(), model="dense", profile="mine")
        catalog.model("dense")
        catalog.profile("mine", "dense")
        lock = made_up_lock(asked, catalog)
        read = {
            repo: dataclasses.replace(anatomy, repository=repo, commit=one.commit)
            for repo, one in lock.sources.items()
        }
        lock = dataclasses.replace(lock, anatomies=read)
        plan_host(Request("a", asked, catalog, lock, PAYLOAD))
    except SparkError as error:
        demand_lines(error)


def demand_lines(error: SparkError) -> None:
    for problem in error.problems:
        assert "\n" not in f"{problem.where}{problem.what}{problem.fix}"
        assert problem.fix


def test_the_documents_themselves_are_planned(own: Path) -> None:
    """Else the changed ones below would all be refused for the same mistake."""
    shown = {**PROFILE, "speculation": None}
    planned(own, MODEL, shown, ANATOMY)
    catalog = read_catalog(own / "ours", own=own / "mine")
    assert catalog.model("dense").adapters["law"].rank == 16
    assert catalog.profile("mine", "dense").kv_cache.dtype == "fp8"
    assert read_shared(SHARED, "x").profile_name == "mine"


@HOSTILE
@given(said=changed_in_one_place(text(MODEL)))
@example(said=text({**MODEL, "memory": {"runtime_gib": 10**30}}))
@example(said=text({**MODEL, "changes": [{"set": {"limits": None}}]}))
@example(said=text({**MODEL, "adapters": {"law": {"repository": "org/dense", "rank": 1}}}))
def test_a_model_of_anybody_is_planned_or_refused_in_one_line(own: Path, said: bytes) -> None:
    planned(own, json.loads(said), {**PROFILE, "speculation": None}, ANATOMY)


@HOSTILE
@given(said=changed_in_one_place(text(PROFILE)))
@example(said=text({**PROFILE, "options": {"block-size": 10**30}}))
@example(said=text({**PROFILE, "options": {"block-size": 0}}))
@example(said=text({**PROFILE, "kv_cache": {"size_gib": 1e-9}}))
def test_a_profile_of_anybody_is_planned_or_refused_in_one_line(own: Path, said: bytes) -> None:
    planned(own, {**MODEL, "adapters": {}}, json.loads(said), ANATOMY)


@HOSTILE
@given(said=changed_in_one_place(text(READ)), bits=st.sampled_from(["auto", "fp8"]))
@example(
    said=text({**READ, "cache": [{"kind": "full", "layers": 1, "token_bytes": 1}]}), bits="fp8"
)
@example(said=text({**READ, "cache": [{"kind": "full", "layers": 1}]}), bits="auto")
@example(said=text({**READ, "weights": {"BF16": 2**62}}), bits="auto")
def test_a_lock_of_anybody_is_planned_with_or_refused_in_one_line(
    own: Path, locked: str, said: bytes, bits: str
) -> None:
    path = own / "lock.yml"
    data = {**yaml.safe_load(locked), "anatomies": {"org/dense": json.loads(said)}}
    path.write_text(json.dumps(data))
    try:
        found = read_lock(path).anatomies["org/dense"]
    except SparkError as error:
        demand_lines(error)
        return
    planned(own, {**MODEL, "adapters": {}}, {**PROFILE, "kv_cache": {"dtype": bits}}, found)


@HOSTILE
@given(said=changed_in_one_place(text(SHARED)))
def test_what_anybody_shared_is_read_or_refused_in_one_line(said: bytes) -> None:
    try:
        read_shared(json.loads(said), "x.yml")
    except SparkError as error:
        demand_lines(error)
