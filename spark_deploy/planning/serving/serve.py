"""One release: everything that decides how the service runs, as the host reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from spark_contract.documents import plain
from spark_contract.host.paths import ENGINE_USER
from spark_contract.host.units import cache_name, release_name
from spark_contract.serving.release import (
    Bench,
    CheckPlan,
    Engine,
    Image,
    Memory,
    Mount,
    Needle,
    Prefix,
    Question,
    Release,
    Timeouts,
    Tree,
    Watch,
)

from spark_deploy.catalog.asked import questions_of
from spark_deploy.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.catalog.profile import Profile
from spark_deploy.documents.digest import digest_of
from spark_deploy.facts.network.fabric import Ports
from spark_deploy.planning.budget.memory import context_tokens
from spark_deploy.planning.engine.argv import (
    CACHE_MOUNT,
    CONTAINER_ARGUMENTS,
    MODEL_MOUNT,
    engine_arguments,
    engine_environment,
)
from spark_deploy.planning.engine.lines import WEDGING_LINE, lines_of
from spark_deploy.planning.serving.cluster import spread
from spark_deploy.planning.serving.unit_limits import start_limits
from spark_deploy.planning.types import (
    BesidePlan,
    CheckpointPlan,
    ImagePlan,
    MemoryPlan,
    RequantizedPlan,
    SourcePlan,
)
from spark_deploy.settings.types import Settings

# A prompt shows in the counters only when all of it was read. Far below what a Spark can do (3,317
# tokens/s were published for two of them at 2K), because reading slows down as the context grows.
_SLOWEST_PROMPT_TOKENS_PER_S = 1000


def serve_plan(
    service: str,
    model: Model,
    profile: Profile,
    settings: Settings,
    tree: CheckpointPlan | RequantizedPlan | SourcePlan,
    image: ImagePlan,
    memory: MemoryPlan,
    beside: Sequence[BesidePlan] = (),
    fabric: Mapping[str, Ports] = MappingProxyType({}),
) -> Release:
    """Return the release of the service, its digest made from its own content."""
    serve = settings.serve
    names = serve.names or (model.name,)
    cache = cache_dir(settings, profile, image)
    release = Release(
        service=service,
        model=model.name,
        profile=profile.name,
        names=(*names, *model.adapters),
        image=Image(
            tag=image.tag,
            digest_label=image.digest if image.plugin else None,
            base=image.base,
            plugin=image.context_digest[:12],
        ),
        tree=Tree(tree.dir, tree.digest),
        beside=tuple(Tree(one.source.dir, one.source.digest) for one in beside),
        engine=Engine(
            argv=engine_arguments(model, profile, memory, names),
            env=engine_environment(
                profile,
                plugin=image.plugin,
                start_timeout_s=serve.start_timeout_s,
                image=image.tag,
            ),
            mounts=(
                Mount(tree.dir, MODEL_MOUNT, True),
                *(Mount(one.source.dir, one.target, True) for one in beside),
                Mount(cache, CACHE_MOUNT, False),
            ),
            docker_args=CONTAINER_ARGUMENTS,
            user=ENGINE_USER,
            max_sequences=profile.limits.max_sequences,
            kv_cache_bytes=profile.kv_cache.size_bytes,
        ),
        memory=Memory(memory.needed_bytes, settings.memory.start_wait_s, memory.floor_bytes),
        timeouts=Timeouts(serve.start_timeout_s, serve.stop_timeout_s, serve.drain_s),
        check=check_plan(model, profile, settings, memory, plugin=image.plugin),
        watch=Watch(
            _stall_s(settings, context_tokens(model, profile)),
            settings.watch.interval_s,
            settings.watch.hot_celsius,
        ),
    )
    if settings.cluster.hosts:
        release = spread(release, settings, fabric)
        release = replace(release, check=_of_cluster(release.check, profile))
    digest = digest_of({**plain(release), "restart": start_limits(release)})
    return replace(release, name=release_name(service, digest), digest=digest)


def cache_dir(settings: Settings, profile: Profile, image: ImagePlan) -> str:
    """Return the folder of compile caches on the host, one in it for each release.

    It is named by the base image and the number of drafts: an engine's cache is not keyed on the
    latter and breaks when it changes. The plugin is not part: compilers store by source.
    """
    drafts = profile.speculation.tokens if profile.speculation else 0
    return f"{settings.paths.cache_dir}/{cache_name(image.base, drafts)}"


def check_plan(
    model: Model, profile: Profile, settings: Settings, memory: MemoryPlan, *, plugin: bool
) -> CheckPlan:
    """Return what the proof demands: of the model, of the profile, and of the plugin's log."""
    required, forbidden = lines_of(model, profile, plugin=plugin)
    pools = isinstance(model, PlainModel) and model.pools
    return CheckPlan(
        timeout_s=settings.check.timeout_s,
        max_model_len=context_tokens(model, profile),
        questions=tuple(
            Question(one.prompt, one.expect, one.max_tokens, one.thinking)
            for one in questions_of(model)
        ),
        copy=tuple(model.check.copy),
        tool_call=model.check.tool_call and model.parsers.tool_call is not None,
        reasoning=model.check.reasoning and model.parsers.reasoning is not None,
        repeat=model.check.repeat and not pools,
        conversation=model.check.conversation,
        # Only for `spark-check --deep`: reading so much takes minutes.
        needle=None if pools else Needle(context_tokens(model, profile) * 3 // 4),
        image=profile.vision and _sees(model),
        acceptance_floor=profile.check.acceptance_floor if profile.speculation else None,
        # The first turn must fill a block: only whole blocks are found again.
        prefix=Prefix(memory.block_tokens) if profile.check.prefix_reuse else None,
        log_required=required,
        log_forbidden=forbidden,
        portable=plugin and profile.engine_mode == "portable",
        metrics_required=dict(profile.check.metrics_required),
        bench=_bench(model, settings),
        task=model.task if isinstance(model, PlainModel) else "chat",
        sound=isinstance(model, PlainModel) and model.audio,
        width=_width(model),
    )


def _bench(model: Model, settings: Settings) -> Bench | None:
    """Return how the speed is measured, which is of chats."""
    if isinstance(model, PlainModel) and model.task != "chat":
        return None
    return Bench(settings.check.bench_s, settings.check.bench_worse_percent)


def _width(model: Model) -> int | None:
    """Return how many numbers an embedding has; a layer behind the model may make it another."""
    if not isinstance(model, PlainModel) or model.task != "embedding":
        return None
    return model.anatomy.width if model.anatomy else None


def _sees(model: Model) -> bool:
    if isinstance(model, HybridModel):
        return model.architecture.vision_bytes > 0
    return model.vision


def _of_cluster(check: CheckPlan, profile: Profile) -> CheckPlan:
    """Return what is demanded of several hosts beside: a library that does not wedge them."""
    if profile.engine_mode != "native":  # no GPU, and another library
        return check
    return replace(check, log_forbidden=(*check.log_forbidden, WEDGING_LINE))


def _stall_s(settings: Settings, longest_prompt_tokens: int) -> int:
    """Return a limit that the longest prompt cannot reach while it is read."""
    reading_s = -(-longest_prompt_tokens // _SLOWEST_PROMPT_TOKENS_PER_S)
    return max(settings.watch.stall_s, reading_s)
