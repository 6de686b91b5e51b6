"""When a host changes between releases by itself, and the timers that have it do so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from spark_contract import tool
from spark_contract.documents import plain, text_of
from spark_contract.paths import ENGINE_USER, engine_dir, release_file
from spark_contract.release import (
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
from spark_contract.units import (
    HOURS,
    SWITCH,
    UNITS_DIR,
    WATCH,
    cache_name,
    drop_in_dir,
    mount_unit,
    release_name,
)

from spark_deploy.config.catalog.asked import questions_of
from spark_deploy.config.catalog.model import HybridModel, Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents.digest import digest_of
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.cluster import spread
from spark_deploy.plan.engine_arguments import (
    CACHE_MOUNT,
    CONTAINER_ARGUMENTS,
    MODEL_MOUNT,
    WEDGING_LINE,
    engine_arguments,
    engine_environment,
    lines_of,
)
from spark_deploy.plan.jobs import needs_mounts
from spark_deploy.plan.kv_cache import context_tokens
from spark_deploy.plan.types import (
    BesidePlan,
    CheckpointPlan,
    ImagePlan,
    ManagedFile,
    MemoryPlan,
    Ports,
    RequantizedPlan,
    ScheduledPlan,
    ServicePlan,
    SourcePlan,
)

# They belong to the release because they follow from its load time.


_DELAY_S = 60
_BURST = 3  # failing starts
_STARTING_STEPS = 3  # ExecStartPre, ExecStart, ExecStartPost: systemd times each by itself
_STOPPING_STEPS = 3  # ExecStop, the signals, ExecStopPost: likewise


def limits(release: Release) -> str:
    """Return the drop-in with this release's time and start limits."""
    again = start_limits(release)
    directories = (mount.source for mount in release.engine.mounts)
    return (
        "[Unit]\n"
        f"{needs_mounts(*directories, engine_dir(release.service))}"
        f"StartLimitIntervalSec={again['interval_s']}\n"
        f"StartLimitBurst={again['burst']}\n"
        "[Service]\n"
        f"RestartSec={again['delay_s']}\n"
        f"TimeoutStartSec={_start_step_s(release)}\n"
        f"TimeoutStopSec={_stop_step_s(release)}\n"
    )


def start_limits(release: Release) -> dict[str, float]:
    """Return how often a failing engine is started again, and within which time.

    The limit must trigger even if every step hangs to its own: a shorter interval would let such
    an engine start for ever. The price: as many crashes within these hours, each after serving
    well, end the service too.
    """
    starting_s = _STARTING_STEPS * _start_step_s(release)
    stopping_s = _STOPPING_STEPS * _stop_step_s(release)
    interval_s = _BURST * (starting_s + stopping_s + _DELAY_S) + 600
    return {"delay_s": _DELAY_S, "burst": _BURST, "interval_s": interval_s}


def _start_step_s(release: Release) -> float:
    return release.timeouts.start_s + release.memory.wait_s + 120


def _stop_step_s(release: Release) -> float:
    return release.timeouts.stop_s + 60


def unit_files_of(units: tuple[ManagedFile, ...]) -> tuple[ManagedFile, ...]:
    """Return the static units, and the commands that people and our own messages use by name."""
    return (*units, _command(tool.CHECK_TOOL, f" {tool.CHECK}"), _command(tool.TOOL, ""))


def _command(name: str, verb: str) -> ManagedFile:
    path = f"{tool.COMMANDS_DIR}/{name}"
    # Sockets, proofs and journals are root's; who logs in to look is mostly not.
    as_root = f'[ "$(id -u)" = 0 ] || exec sudo -- {path} "$@"'
    text = f'#!/bin/sh\n{as_root}\nexec {tool.HOST_TOOL}{verb} "$@"\n'
    return ManagedFile(path, text.encode(), 0o755)


def release_files_of(plan: ServicePlan) -> tuple[ManagedFile, ...]:
    """Return release.json and the unit's limits, of what is served and of what has its times."""
    others = {one.release.name: one.release for one in plan.schedule if one.release != plan.serve}
    files = (file for release in (*others.values(), plan.serve) for file in _files(release))
    return tuple({file.path: file for file in files}.values())


def _files(release: Release) -> tuple[ManagedFile, ...]:
    return (
        ManagedFile(release_file(release.name), text_of(release).encode()),
        _socket_mount(release.service),
        *_reaching(release),
        ManagedFile(f"{drop_in_dir(release.serve_unit)}/50-release.conf", limits(release).encode()),
    )


def _reaching(release: Release) -> Iterator[ManagedFile]:
    """Yield what lets members of a cluster reach each other, and nobody else."""
    if release.cluster is not None:
        addresses = " ".join(member.address for member in release.cluster.members)
        path = f"{drop_in_dir(WATCH.of(release.name))}/50-cluster.conf"
        yield ManagedFile(path, f"[Service]\nIPAddressAllow={addresses}\n".encode())
        # With all of root's rights, which the unit has not; a start does not depend on it.
        up, down = (tool.line(tool.FENCE, order, release.name) for order in ("up", "down"))
        text = f"[Service]\nExecStartPre=-+{up}\nExecStopPost=-+{down}\n"
        yield ManagedFile(f"{drop_in_dir(release.serve_unit)}/50-cluster.conf", text.encode())


def _socket_mount(service: str) -> ManagedFile:
    """Return the mount unit of the folder in which the engine makes its socket.

    Whatever the engine writes there fills a file system of its own, and no link in it is followed.
    """
    folder = engine_dir(service)
    text = (
        "[Unit]\n"
        f"Description=Folder of the socket of the Spark engine {service}\n"
        "[Mount]\n"
        f"What=tmpfs\nWhere={folder}\nType=tmpfs\n"
        "Options=mode=0700,size=256k,nr_inodes=64,nosuid,nodev,noexec,nosymfollow\n"
    )
    return ManagedFile(f"{UNITS_DIR}/{mount_unit(folder)}", text.encode())


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


def timer_files(schedule: Sequence[ScheduledPlan]) -> tuple[ManagedFile, ...]:
    """Return a timer for each release of a schedule.

    It starts the same unit as a deploy does: proven, with a way back. A time that passed while the
    host was off is left out: of several missed ones, nobody could say which is to win.
    """
    times: dict[str, list[str]] = {}
    for one in schedule:
        times.setdefault(one.release.name, []).append(one.at)
    return tuple(
        ManagedFile(f"{UNITS_DIR}/{HOURS.of(name)}", _text(name, at).encode())
        for name, at in times.items()
    )


def _text(release: str, times: Sequence[str]) -> str:
    calendar = "".join(f"OnCalendar={at}\n" for at in times)
    return (
        f"[Unit]\nDescription=Times at which the Spark service changes to {release}\n\n"
        f"[Timer]\n{calendar}Unit={SWITCH.of(release)}\nAccuracySec=10s\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )
