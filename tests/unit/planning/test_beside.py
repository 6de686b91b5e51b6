"""What an engine loads beside a model: drafters and adapters, mounted, verified and counted."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from spark_contract.documents import parse, text_of
from spark_contract.release import Release

from spark_deploy.config.catalog.anatomy import Anatomy, CacheLayers
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.catalog.profile import Adapter, Speculation
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import PlanError
from spark_deploy.lock.resolve import wanted_by
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.jobs import jobs_of, keep_of
from spark_deploy.plan.kv_cache import shape_of
from spark_deploy.plan.memory import GIB
from spark_deploy.plan.resolve import Request
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import PAYLOAD, made_up_lock, settings_of
from tests.unit.planning.test_plain import ANATOMY, MODEL, REPO, catalog_of

DRAFT = "org/drafter"
DRAFTER = dataclasses.replace(
    ANATOMY, repository=DRAFT, weights={"BF16": GIB}, vision_bytes=0, drafter_bytes=0,
    cache=(CacheLayers(kind="full", layers=2, token_bytes=4096),),
)  # fmt: skip
LORA = Anatomy(repository="org/lora", commit="0" * 40, weights={"F32": 48 << 20})
ADAPTED = dataclasses.replace(
    MODEL, adapters={"law": Adapter(repository="org/lora", rank=48)}
)  # fmt: skip


def drafting(method: str, **more: Any) -> Speculation:
    return Speculation(method=method, tokens=3, **more)  # type: ignore[arg-type]


def plan(
    speculation: Speculation | None = None,
    model: PlainModel = MODEL,
    read: tuple[Anatomy, ...] = (ANATOMY, DRAFTER, LORA),
    options: dict[str, Any] | None = None,
    **more: Any,
) -> HostPlan:
    settings = dataclasses.replace(settings_of(**more), model="dense", profile="plain")
    catalog = with_drafts(catalog_of(model), speculation, options or {})
    lock = made_up_lock(settings, catalog)
    found = {
        one.repository: dataclasses.replace(one, commit=lock.sources[one.repository].commit)
        for one in read
        if one.repository in lock.sources
    }
    lock = dataclasses.replace(lock, anatomies=found)
    return plan_host(Request("a", settings, catalog, lock, PAYLOAD))


def with_drafts(catalog: Catalog, drafts: Speculation | None, options: dict[str, Any]) -> Catalog:
    profile = catalog.profile("plain", "dense")
    changed = dataclasses.replace(profile, speculation=drafts, options=options)
    return dataclasses.replace(catalog, profiles={**catalog.profiles, ("plain", "dense"): changed})


def option(found: HostPlan, name: str) -> str:
    argv = found.serve.engine.argv
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize("method", ["dflash", "eagle3", "draft_model"])
def test_a_drafter_is_fetched_verified_mounted_and_counted(method: str) -> None:
    found, without = plan(drafting(method, repository=DRAFT)), plan()
    assert [source.locked.repo for source in found.sources] == [REPO, DRAFT]
    assert [work.job.kind for work in jobs_of(found, ())] == ["fetch", "fetch", "image-pull"]
    drafter = found.sources[1]
    [mount] = [one for one in found.serve.engine.mounts if one.source == drafter.dir]
    assert (mount.target, mount.read_only) == ("/drafter", True)
    assert [(one.path, one.digest) for one in found.serve.beside] == [(drafter.dir, drafter.digest)]
    told = json.loads(option(found, "--speculative-config"))
    assert told == {"method": method, "num_speculative_tokens": 3, "model": "/drafter"}
    assert found.memory.drafter_bytes == GIB
    assert any(use.what == DRAFT for use in found.disk)
    assert drafter.dir in keep_of(found).folders
    tokens, before = (one.memory.kv_tokens or 0 for one in (found, without))
    assert 0 < tokens < before, "its layers keep tokens too"
    assert found.serve.name != without.serve.name


def test_a_drafter_whose_cache_is_unknown_leaves_the_cache_unknown() -> None:
    odd = dataclasses.replace(DRAFTER, cache=(), cache_unknown="layers of x are unknown")
    found = plan(drafting("eagle3", repository=DRAFT), read=(ANATOMY, odd))
    assert found.memory.kv_tokens is None
    assert found.memory.unknown == ("KV cache of a token, the drafter's: layers of x are unknown",)


def test_drafts_from_the_request_itself_take_no_bytes() -> None:
    found = plan(drafting("ngram", longest_match=5, shortest_match=2))
    assert json.loads(option(found, "--speculative-config")) == {
        "method": "ngram", "num_speculative_tokens": 3,
        "prompt_lookup_max": 5, "prompt_lookup_min": 2,
    }  # fmt: skip
    assert found.memory.drafter_bytes == 0
    assert len(found.sources) == 1


def test_a_host_that_switches_drafts_off_or_fewer_keeps_the_method() -> None:
    fewer = plan(drafting("eagle3", repository=DRAFT), **{"engine.drafts": 1})
    told = json.loads(option(fewer, "--speculative-config"))
    assert (told["method"], told["num_speculative_tokens"]) == ("eagle3", 1)
    off = plan(drafting("eagle3", repository=DRAFT), **{"engine.drafts": 0})
    assert "--speculative-config" not in off.serve.engine.argv
    assert len(off.sources) == 1


def test_an_adapter_has_a_name_a_mount_and_a_slot() -> None:
    found, without = plan(model=ADAPTED), plan()
    assert found.serve.names == ("dense", "law")
    argv = found.serve.engine.argv
    assert option(found, "--served-model-name") == "dense"
    assert argv[argv.index("--served-model-name") + 2].startswith("--"), "the adapter has its own"
    assert option(found, "--lora-modules") == "law=/adapters/0"
    assert option(found, "--max-lora-rank") == "64", "the engine knows widths of slots only"
    assert "--enable-lora" in argv
    [tree] = found.serve.beside
    assert [one.target for one in found.serve.engine.mounts if one.source == tree.path] == [
        "/adapters/0"
    ]
    assert found.memory.weights_bytes - without.memory.weights_bytes == 64 << 20


def test_adapters_and_drafts_together_are_refused() -> None:
    with pytest.raises(PlanError, match="unverified with adapters"):
        plan(drafting("ngram"), model=ADAPTED)


def test_the_lock_names_every_repository_that_is_mounted() -> None:
    catalog = with_drafts(catalog_of(ADAPTED), drafting("eagle3", repository=DRAFT), {})
    settings = dataclasses.replace(settings_of(), model="dense", profile="plain")
    assert {repo for repo, _ in wanted_by(settings, catalog).sources} == {REPO, DRAFT, "org/lora"}


def test_a_release_without_them_is_the_document_it_was() -> None:
    text = text_of(plan().serve)
    assert '"beside"' not in text
    assert parse(Release, text).trees == (plan().serve.tree,)


def test_a_larger_block_is_counted() -> None:
    found = plan(options={"block-size": 64})
    assert found.memory.block_tokens == 64
    assert option(found, "--block-size") == "64"
    assert shape_of(MODEL, plan_profile()) is None, "nobody read it"


def plan_profile() -> Any:
    return catalog_of(MODEL).profile("plain", "dense")


WRONG = {
    "a drafter that nobody names": {"method": "eagle3", "tokens": 2},
    "a repository for words": {"method": "ngram", "tokens": 2, "repository": DRAFT},
    "words for layers": {"method": "mtp", "tokens": 2, "longest_match": 3},
    "too deep for one layer": {"method": "mtp", "tokens": 9},
    "matches the wrong way round": {
        "method": "ngram", "tokens": 2, "longest_match": 2, "shortest_match": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG.values(), ids=list(WRONG))
def test_drafts_of_no_form_are_named(said: dict[str, Any]) -> None:
    assert len(list(Speculation(**said).broken())) == 1
