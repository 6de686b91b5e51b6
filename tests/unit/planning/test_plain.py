from dataclasses import replace

import pytest

from spark_deploy.config.catalog.architecture import CacheLayers, MeasuredCache, RepoMetadata
from spark_deploy.config.catalog.model import Parsers, PlainModel
from spark_deploy.config.documents import GIB
from spark_deploy.config.errors import PlanError
from spark_deploy.lock.types import SourceFile
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.jobs import plan_jobs
from spark_deploy.plan.kv_cache import cache_shape
from spark_deploy.plan.resolve import Request, plan_problems
from tests.unit.planning.plans import CATALOG, PAYLOAD, made_up_lock, settings_of

REPO = "org/dense"
FULL = CacheLayers(kind="full", layers=32, token_bytes=4096)
METADATA = RepoMetadata(
    repository=REPO, commit="0" * 40, architecture="LlamaForCausalLM", model_type="llama",
    weights={"BF16": 16 * GIB}, vision_bytes=GIB, drafter_bytes=2 * GIB, context_tokens=131072,
    width=4096, cache=(FULL,),
)  # fmt: skip
MODEL = PlainModel(
    name="dense", kind="plain", summary="Dense", choose_when="tests", repository=REPO,
)  # fmt: skip
V033 = "registry.example/vllm:v0.33.0"


def catalog_of(model):
    plain = replace(
        CATALOG.profile("base", "large"), name="plain", options={}, load_format="safetensors"
    )
    profiles = {**CATALOG.profiles, ("plain", "dense"): plain}
    profiles |= {(name, "dense"): CATALOG.profile(name, "large") for name in ("base", "v2")}
    return replace(CATALOG, models={**CATALOG.models, "dense": model}, profiles=profiles)


def make_plan(model=MODEL, metadata=METADATA, profile="plain", **settings):
    chosen = replace(settings_of(**settings), model="dense", profile=profile)
    catalog = catalog_of(model)
    lock = made_up_lock(chosen, catalog)
    source = lock.sources[REPO]
    large = (SourceFile("model.safetensors", 17 * GIB, sha256="a" * 64),
             SourceFile("original/model.safetensors", 17 * GIB, sha256="b" * 64))  # fmt: skip
    source = replace(source, files=(*source.files, *large))
    repo_metadata = (
        {REPO: replace(metadata, repository=REPO, commit=source.commit)} if metadata else {}
    )
    lock = replace(lock.with_entries([source]), repo_metadata=repo_metadata)
    return plan_host(Request("a", chosen, catalog, lock, PAYLOAD))


def refused(model=MODEL, **settings):
    with pytest.raises(PlanError) as error:
        make_plan(model, **settings)
    return "\n".join(str(problem) for problem in error.value.problems)


def test_serves_downloaded_files_without_build():
    plan = make_plan()
    assert plan.checkpoint is None
    assert [work.job.kind for work in plan_jobs(plan, ())] == ["fetch", "image-pull"]
    assert plan.release.tree.path == plan.sources[0].dir
    assert plan.image.tag == plan.image.base


def test_excluded_files_are_not_downloaded():
    whole, without = make_plan(), make_plan(replace(MODEL, leave_out=("original/*",)))
    assert whole.sources[0].size_bytes - without.sources[0].size_bytes == 17 * GIB
    assert whole.release.tree.digest != without.release.tree.digest


def test_memory_plan_is_computed_from_headers_and_config():
    memory = make_plan().memory
    assert (memory.weights_bytes, memory.drafter_bytes) == (17 * GIB, 0)
    assert memory.kv_tokens == memory.kv_cache_bytes // (32 * 4096) // 16 * 16
    assert memory.unknown == ()


def test_vision_tower_is_loaded_only_with_vision():
    model = replace(MODEL, vision=True)
    off, on = make_plan(model), make_plan(model, **{"engine.vision": True})
    assert on.memory.weights_bytes - off.memory.weights_bytes == GIB
    assert ["--language-model-only" in plan.release.engine.argv for plan in (off, on)] == [
        True,
        False,
    ]
    assert on.release.check.image


def test_fp8_cache_halves_block_size():
    profile = catalog_of(MODEL).profile("plain", "dense")
    narrow = replace(profile, kv_cache=replace(profile.kv_cache, dtype="fp8"))
    shapes = [cache_shape(replace(MODEL, metadata=METADATA), p) for p in (profile, narrow)]
    assert shapes[0].block_bytes == 2 * shapes[1].block_bytes


def test_sliding_window_cache_holds_the_window_and_one_step():
    cache = tuple(replace(FULL, kind=kind, layers=16, window_tokens=window)
                  for kind, window in (("full", 0), ("sliding", 1024)))  # fmt: skip
    profile = catalog_of(MODEL).profile("plain", "dense")
    shape = cache_shape(replace(MODEL, metadata=replace(METADATA, cache=cache)), profile)
    assert shape.block_bytes == 16 * 16 * 4096
    step = profile.limits.max_batched_tokens
    assert shape.request_blocks(131072) == 131072 // 16 + (1024 + step) // 16 + 1


UNKNOWN = replace(METADATA, cache=(), cache_unknown="layers of odd are unknown")


def test_unknown_cache_size_is_reported_and_limited_by_memory_fraction():
    memory = make_plan(metadata=UNKNOWN).memory
    assert (memory.kv_tokens, memory.full_context_users) == (None, None)
    assert memory.unknown == ("KV cache per token: layers of odd are unknown",)
    assert memory.needed_bytes == make_plan().memory.needed_bytes
    pinned = make_plan(metadata=UNKNOWN, **{"engine.kv_cache_gib": 8}).memory
    assert pinned.kv_cache_bytes == 8 * GIB


def test_rejects_unread_headers_and_weights_that_do_not_fit():
    assert "run `spark-deploy update --missing`" in refused(metadata=None)
    large = replace(UNKNOWN, weights={"BF16": 200 * GIB})
    assert "does not fit on one host" in refused(metadata=large)


def test_rejects_architecture_that_engine_does_not_list():
    unlisted = replace(METADATA, architecture="NobodyForCausalLM")
    assert "NobodyForCausalLM" in refused(metadata=unlisted, **{"images.engine": V033})
    newer = replace(METADATA, architecture="DoryForCausalLM")
    make_plan(metadata=newer, **{"images.engine": V033})
    v030 = {"images.engine": "registry.example/vllm:v0.30.0"}
    assert "use an image with vLLM 0.33.0" in refused(metadata=newer, **v030)
    make_plan(metadata=unlisted, **{"images.engine": "registry.example/vllm:nightly"})
    make_plan(
        metadata=unlisted, **{"images.engine": V033, "engine.options.model-impl": "transformers"}
    )


def test_rejects_parsers_that_engine_does_not_have():
    model = replace(MODEL, parsers=Parsers(reasoning="qwen", tool_call="nano_v3"))
    message = refused(model, **{"images.engine": V033})
    assert "parsers.reasoning: vLLM 0.33.0 has no parser qwen" in message
    assert "did you mean qwen3?" in message
    assert "parsers.tool_call: vLLM 0.33.0 has no parser nano_v3" in message
    make_plan(model, **{"images.engine": "registry.example/vllm:nightly"})


def test_rejects_profiles_that_build_checkpoints():
    assert "profile plain" in refused(profile="v2")


def test_valid_settings_have_no_problems_without_a_lock_file():
    settings = replace(settings_of(), model="dense", profile="plain")
    assert plan_problems(settings, catalog_of(MODEL)) == []


MEASURED = MeasuredCache(
    kv_cache="auto", context_tokens=131072, token_bytes=10_000, by="spark-1, main-abc, engine 1"
)


def test_measured_cache_size_replaces_an_unknown_size():
    blind, measured = (
        make_plan(metadata=UNKNOWN),
        make_plan(metadata=replace(UNKNOWN, measured=MEASURED)),
    )
    memory = measured.memory
    assert memory.kv_tokens == pytest.approx(memory.kv_cache_bytes / 10_000, rel=0.001)
    assert memory.unknown == ()
    assert memory.measured_by.startswith("spark-1, main-abc")
    assert measured.release == blind.release


@pytest.mark.parametrize(
    "metadata",
    [
        replace(UNKNOWN, measured=replace(MEASURED, kv_cache="fp8")),
        replace(METADATA, measured=MEASURED),
    ],
    ids=["other cache type", "computed cache"],
)
def test_ignores_measured_cache_size_that_does_not_apply(metadata):
    assert make_plan(metadata=metadata).memory.measured_by == ""


def test_rejects_narrow_experts_with_grouped_scales():
    for quantization in ("", "fp8"):
        make_plan(metadata=replace(METADATA, expert_width=64, quantization=quantization))
    grouped = replace(METADATA, expert_width=64, quantization="gptq, 4 bit")
    assert "experts-of-one-group" in refused(metadata=grouped)
