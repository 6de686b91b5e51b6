"""Plans of repositories that are served as they were published."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from spark_deploy.cli.plan_text import plan_text
from spark_deploy.config.catalog.anatomy import Anatomy, CacheLayers, CountedCache
from spark_deploy.config.catalog.model import Parsers, PlainModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import PlanError
from spark_deploy.lock.types import SourceFile
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.jobs import jobs_of
from spark_deploy.plan.kv_cache import shape_of
from spark_deploy.plan.memory import GIB
from spark_deploy.plan.resolve import Request, problems_of
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import CATALOG, PAYLOAD, made_up_lock, settings_of

REPO = "org/dense"
FULL = CacheLayers(kind="full", layers=32, token_bytes=4096)
ANATOMY = Anatomy(
    repository=REPO, commit="0" * 40, architecture="LlamaForCausalLM", model_type="llama",
    weights={"BF16": 16 * GIB}, vision_bytes=GIB, drafter_bytes=2 * GIB, context_tokens=131072,
    width=4096, cache=(FULL,),
)  # fmt: skip
MODEL = PlainModel(
    name="dense", kind="plain", summary="Dense", choose_when="tests", repository=REPO,
)  # fmt: skip


def catalog_of(model: PlainModel) -> Catalog:
    profile = CATALOG.profile("base", "large")
    plain = dataclasses.replace(profile, name="plain", options={}, load_format="safetensors")
    profiles = {**CATALOG.profiles, ("plain", "dense"): plain}
    profiles |= {(name, "dense"): CATALOG.profile(name, "large") for name in ("base", "v2")}
    return dataclasses.replace(
        CATALOG, models={**CATALOG.models, "dense": model}, profiles=profiles
    )


def plan(
    model: PlainModel = MODEL,
    anatomy: Anatomy | None = ANATOMY,
    profile: str = "plain",
    **more: Any,
) -> HostPlan:
    settings = dataclasses.replace(settings_of(**more), model="dense", profile=profile)
    catalog = catalog_of(model)
    lock = made_up_lock(settings, catalog)
    source = lock.sources[REPO]
    large = (SourceFile("model.safetensors", 17 * GIB, sha256="a" * 64),
             SourceFile("original/model.safetensors", 17 * GIB, sha256="b" * 64))  # fmt: skip
    source = dataclasses.replace(source, files=(*source.files, *large))
    read = [dataclasses.replace(anatomy, commit=source.commit)] if anatomy else []
    anatomies = {one.repository: one for one in read}
    lock = dataclasses.replace(lock.also([source]), anatomies=anatomies)
    return plan_host(Request("a", settings, catalog, lock, PAYLOAD))


def refused(model: PlainModel = MODEL, **more: Any) -> str:
    with pytest.raises(PlanError) as error:
        plan(model, **more)
    return "\n".join(str(problem) for problem in error.value.problems)


def test_its_files_are_fetched_and_served_and_nothing_is_built() -> None:
    found = plan()
    assert found.checkpoint is None
    assert [work.job.kind for work in jobs_of(found, ())] == ["fetch", "image-pull"]
    assert found.serve.tree.path == found.sources[0].dir
    assert found.image.tag == found.image.base, "the image is used unchanged"


def test_files_that_nobody_reads_are_neither_fetched_nor_counted() -> None:
    whole = plan()
    model = dataclasses.replace(MODEL, leave_out=("original/*",))
    less = plan(model)
    assert whole.sources[0].size_bytes - less.sources[0].size_bytes == 17 * GIB
    assert whole.serve.tree.digest != less.serve.tree.digest


def test_memory_is_what_headers_and_configuration_say() -> None:
    memory = plan().memory
    # Nothing says that it could take pictures, so the engine drops no tower.
    assert memory.weights_bytes == 17 * GIB
    assert memory.drafter_bytes == 0, "drafts are off"
    assert memory.kv_tokens == memory.kv_cache_bytes // (32 * 4096) // 16 * 16
    assert memory.unknown == ()


def test_towers_of_pictures_count_where_pictures_are_on() -> None:
    model = dataclasses.replace(MODEL, vision=True)
    without, with_them = plan(model), plan(model, **{"engine.vision": True})
    assert with_them.memory.weights_bytes - without.memory.weights_bytes == GIB
    assert "--language-model-only" in without.serve.engine.argv
    assert "--language-model-only" not in with_them.serve.engine.argv
    assert with_them.serve.check.image


def test_an_eight_bit_cache_holds_twice_as_much() -> None:
    catalog = catalog_of(MODEL)
    profile = catalog.profile("plain", "dense")
    small = dataclasses.replace(
        profile, kv_cache=dataclasses.replace(profile.kv_cache, dtype="fp8")
    )
    model = dataclasses.replace(MODEL, anatomy=ANATOMY)
    wide, narrow = (shape_of(model, one) for one in (profile, small))
    assert wide
    assert narrow
    assert wide.block_bytes == 2 * narrow.block_bytes


def test_a_window_costs_what_it_keeps() -> None:
    """Two groups of 16 layers: one keeps the context, one a window and what a step adds."""
    kinds = [dataclasses.replace(FULL, kind=kind, layers=16, window_tokens=window)
             for kind, window in (("full", 0), ("sliding", 1024))]  # fmt: skip
    model = dataclasses.replace(MODEL, anatomy=dataclasses.replace(ANATOMY, cache=tuple(kinds)))
    profile = catalog_of(MODEL).profile("plain", "dense")
    shape = shape_of(model, profile)
    assert shape
    assert shape.block_bytes == 16 * 16 * 4096
    step = profile.limits.max_batched_tokens
    assert shape.request_blocks(131072) == 131072 // 16 + (1024 + step) // 16 + 1


def test_a_cache_that_is_not_known_is_said_and_bounded_by_the_fraction() -> None:
    anatomy = dataclasses.replace(ANATOMY, cache=(), cache_unknown="layers of x are unknown")
    memory = plan(anatomy=anatomy).memory
    assert memory.kv_tokens is None
    assert memory.full_context_users is None
    assert memory.unknown == ("KV cache of a token: layers of x are unknown",)
    assert memory.needed_bytes == plan().memory.needed_bytes
    pinned = plan(anatomy=anatomy, **{"engine.kv_cache_gib": 8}).memory
    assert pinned.kv_cache_bytes == 8 * GIB


def test_weights_that_do_not_fit_are_refused_though_the_cache_is_not_known() -> None:
    anatomy = dataclasses.replace(ANATOMY, cache=(), cache_unknown="?", weights={"BF16": 200 * GIB})
    assert "does not fit on one host" in refused(anatomy=anatomy)


def test_what_nobody_read_is_refused_by_name() -> None:
    assert "run `spark-deploy update --missing`" in refused(anatomy=None)


def test_an_architecture_that_the_engine_does_not_list_is_refused_with_one_that_does() -> None:
    image = "registry.example/vllm:v0.33.0"
    odd = dataclasses.replace(ANATOMY, architecture="NobodyForCausalLM")
    said = refused(anatomy=odd, **{"images.engine": image})
    assert "NobodyForCausalLM" in said
    newer = dataclasses.replace(ANATOMY, architecture="DoryForCausalLM")
    old = "registry.example/vllm:v0.30.0"
    plan(anatomy=newer, **{"images.engine": image})
    assert "name an image of vLLM 0.33.0" in refused(anatomy=newer, **{"images.engine": old})
    # An image of somebody else's tag, and a way round that was chosen.
    plan(anatomy=odd, **{"images.engine": "registry.example/vllm:nightly"})
    plan(anatomy=odd, **{"images.engine": image, "engine.options.model-impl": "transformers"})


def test_a_parser_that_the_engine_does_not_have_is_refused_before_a_byte() -> None:
    asks = dataclasses.replace(MODEL, parsers=Parsers(reasoning="qwen", tool_call="nano_v3"))
    said = refused(asks, **{"images.engine": "registry.example/vllm:v0.33.0"})
    assert "parsers.reasoning: qwen is not a parser" in said
    assert "did you mean qwen3?" in said
    assert "parsers.tool_call: nano_v3 is not a parser" in said
    plan(asks, **{"images.engine": "registry.example/vllm:nightly"})


def test_profiles_that_build_trees_are_for_other_models() -> None:
    assert "profile plain" in refused(profile="v2")


def test_without_a_lock_only_what_can_be_known_is_judged() -> None:
    settings = dataclasses.replace(settings_of(), model="dense", profile="plain")
    assert problems_of(settings, catalog_of(MODEL)) == []


def test_a_model_without_questions_is_asked_what_any_instruct_model_answers() -> None:
    asked = plan().serve.check
    assert len(asked.plain_questions) == 3
    assert not asked.tool_call


UNKNOWN = dataclasses.replace(ANATOMY, cache=(), cache_unknown="layers of odd are unknown")
COUNTED = CountedCache(
    kv_cache="auto", context_tokens=131072, token_bytes=10_000, by="spark-1, main-abc, engine 1"
)


def test_what_an_engine_counted_is_planned_with_where_nobody_could_compute_it() -> None:
    blind = plan(anatomy=UNKNOWN)
    found = plan(anatomy=dataclasses.replace(UNKNOWN, counted=COUNTED))
    assert blind.memory.kv_tokens is None
    assert found.memory.kv_tokens == pytest.approx(found.memory.kv_cache_bytes / 10_000, rel=0.001)
    assert found.memory.unknown == ()
    assert found.memory.counted_by.startswith("spark-1, main-abc")
    assert found.serve == blind.serve, "the engine that was proven need not be started anew"


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(UNKNOWN, counted=dataclasses.replace(COUNTED, kv_cache="fp8")),
        dataclasses.replace(ANATOMY, counted=COUNTED),  # it is known better
    ],
    ids=["of another cache", "of a known cache"],
)
def test_a_figure_of_something_else_is_not_planned_with(other: Anatomy) -> None:
    assert plan(anatomy=other).memory.counted_by == ""


@pytest.mark.parametrize("anatomy", [ANATOMY, UNKNOWN], ids=["known", "unknown"])
def test_a_plan_is_told_whether_the_cache_is_known_or_not(anatomy: Anatomy) -> None:
    found = plan(anatomy=anatomy)
    model = dataclasses.replace(MODEL, anatomy=anatomy)
    profile = catalog_of(model).profile("plain", "dense")
    for told in (plan_text(found, model, profile, verbose=loud) for loud in (False, True)):
        assert "KV cache" in "\n".join(told)


@pytest.mark.parametrize(
    ("stored", "refused"), [("", False), ("fp8", False), ("gptq, 4 bit", True)]
)
def test_narrow_experts_are_refused_where_their_weights_have_scales_in_groups(
    stored: str, refused: bool
) -> None:
    anatomy = dataclasses.replace(ANATOMY, expert_width=64, quantisation=stored)
    if refused:
        with pytest.raises(PlanError, match="experts-of-one-group"):
            plan(anatomy=anatomy)
    else:
        plan(anatomy=anatomy)
