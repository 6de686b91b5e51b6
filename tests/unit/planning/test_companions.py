import json
from dataclasses import replace

import pytest
from spark_contract.documents import parse, to_json
from spark_contract.release import Release

from spark_deploy.config.catalog.architecture import CacheLayers, RepoMetadata
from spark_deploy.config.catalog.profile import Adapter, Speculation
from spark_deploy.config.documents import GIB
from spark_deploy.config.errors import PlanError
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.jobs import keep_list, plan_jobs
from spark_deploy.plan.kv_cache import cache_shape
from spark_deploy.plan.resolve import Request
from tests.unit.planning.plans import PAYLOAD, made_up_lock, settings_of
from tests.unit.planning.test_plain import METADATA, MODEL, REPO, catalog_of

DRAFT = "org/drafter"
DRAFTER = replace(
    METADATA, repository=DRAFT, weights={"BF16": GIB}, vision_bytes=0, drafter_bytes=0,
    cache=(CacheLayers(kind="full", layers=2, token_bytes=4096),),
)  # fmt: skip
LORA = RepoMetadata(repository="org/lora", commit="0" * 40, weights={"F32": 48 << 20})
ADAPTED = replace(MODEL, adapters={"law": Adapter(repository="org/lora", rank=48)})
EAGLE = Speculation(method="eagle3", tokens=3, repository=DRAFT)


def catalog_with(model, drafts=None, options=None):
    catalog = catalog_of(model)
    profile = catalog.profile("plain", "dense")
    changed = replace(profile, speculation=drafts, options=options or {})
    return replace(catalog, profiles={**catalog.profiles, ("plain", "dense"): changed})


def make_plan(
    drafts=None, model=MODEL, repo_metadata=(METADATA, DRAFTER, LORA), options=None, **settings
):
    chosen = replace(settings_of(**settings), model="dense", profile="plain")
    catalog = catalog_with(model, drafts, options)
    lock = made_up_lock(chosen, catalog)
    known = {
        metadata.repository: replace(metadata, commit=lock.sources[metadata.repository].commit)
        for metadata in repo_metadata
        if metadata.repository in lock.sources
    }
    lock = replace(lock, repo_metadata=known)
    return plan_host(Request("a", chosen, catalog, lock, PAYLOAD))


def value_of(plan, option):
    argv = plan.release.engine.argv
    return argv[argv.index(option) + 1]


def drafts_of(plan):
    return json.loads(value_of(plan, "--speculative-config"))


@pytest.mark.parametrize("method", ["dflash", "eagle3", "draft_model"])
def test_drafter_is_downloaded_mounted_and_counted_in_the_memory_plan(method):
    plan, without = make_plan(replace(EAGLE, method=method)), make_plan()
    assert [source.locked.repo for source in plan.sources] == [REPO, DRAFT]
    assert [work.job.kind for work in plan_jobs(plan, ())] == ["fetch", "fetch", "image-pull"]
    drafter = plan.sources[1]
    [mount] = [mount for mount in plan.release.engine.mounts if mount.source == drafter.dir]
    assert (mount.target, mount.read_only) == ("/drafter", True)
    trees = [(tree.path, tree.digest) for tree in plan.release.companions]
    assert trees == [(drafter.dir, drafter.digest)]
    assert drafts_of(plan) == {"method": method, "num_speculative_tokens": 3, "model": "/drafter"}
    assert plan.memory.drafter_bytes == GIB
    assert any(use.label == DRAFT for use in plan.disk)
    assert drafter.dir in keep_list(plan).folders
    assert 0 < plan.memory.kv_tokens < without.memory.kv_tokens
    assert plan.release.name != without.release.name


def test_cache_size_is_unknown_if_the_drafter_cache_is_unknown():
    unknown = replace(DRAFTER, cache=(), cache_unknown="layers of x are unknown")
    memory = make_plan(EAGLE, repo_metadata=(METADATA, unknown)).memory
    assert memory.kv_tokens is None
    assert memory.unknown == ("KV cache of the drafter per token: layers of x are unknown",)


def test_ngram_drafts_do_not_need_memory():
    plan = make_plan(Speculation(method="ngram", tokens=3, longest_match=5, shortest_match=2))
    assert drafts_of(plan) == {
        "method": "ngram", "num_speculative_tokens": 3,
        "prompt_lookup_max": 5, "prompt_lookup_min": 2,
    }  # fmt: skip
    assert plan.memory.drafter_bytes == 0
    assert len(plan.sources) == 1


def test_drafts_setting_changes_the_draft_count_or_disables_the_drafter():
    fewer, off = (make_plan(EAGLE, **{"engine.drafts": drafts}) for drafts in (1, 0))
    config = drafts_of(fewer)
    assert (config["method"], config["num_speculative_tokens"]) == ("eagle3", 1)
    assert "--speculative-config" not in off.release.engine.argv
    assert len(off.sources) == 1


def test_adapter_has_a_served_name_a_mount_and_a_lora_slot():
    plan, without = make_plan(model=ADAPTED), make_plan()
    argv = plan.release.engine.argv
    assert plan.release.names == ("dense", "law")
    assert argv[argv.index("--served-model-name") + 2].startswith("--")
    assert value_of(plan, "--lora-modules") == "law=/adapters/0"
    assert value_of(plan, "--max-lora-rank") == "64"
    assert "--enable-lora" in argv
    [tree] = plan.release.companions
    mounts = {mount.source: mount.target for mount in plan.release.engine.mounts}
    assert mounts[tree.path] == "/adapters/0"
    assert plan.memory.weights_bytes - without.memory.weights_bytes == 64 << 20


def test_rejects_adapters_combined_with_drafts():
    with pytest.raises(PlanError, match="never been tested with adapters"):
        make_plan(Speculation(method="ngram", tokens=3), model=ADAPTED)


def test_release_without_companions_has_no_companion_field():
    release = make_plan().release
    assert '"companions"' not in to_json(release)
    assert parse(Release, to_json(release)).trees == (release.tree,)


def test_cache_plan_uses_the_block_size_option():
    plan = make_plan(options={"block-size": 64})
    assert plan.memory.block_tokens == 64
    assert value_of(plan, "--block-size") == "64"
    assert cache_shape(MODEL, catalog_of(MODEL).profile("plain", "dense")) is None


@pytest.mark.parametrize(
    "drafts",
    [
        {"method": "eagle3", "tokens": 2},
        {"method": "ngram", "tokens": 2, "repository": DRAFT},
        {"method": "mtp", "tokens": 2, "longest_match": 3},
        {"method": "mtp", "tokens": 9},
        {"method": "ngram", "tokens": 2, "longest_match": 2, "shortest_match": 3},
    ],
)
def test_rejects_invalid_speculative_decoding_settings(drafts):
    assert len(list(Speculation(**drafts).violations())) == 1
