"""Plan the release of a service and its files on the host: document, unit limits, timers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from spark_contract import release as contract
from spark_contract import tool, units
from spark_contract.documents import to_json, to_plain
from spark_contract.paths import ENGINE_USER, engine_dir, release_file
from spark_contract.release import CheckPlan, Mount, Release, Tree

from spark_deploy.config.catalog.model import HybridModel, PlainModel, check_questions
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents import digest_of
from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.service import ServeSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan import engine_arguments as engine
from spark_deploy.plan.cluster import cluster_release
from spark_deploy.plan.jobs import needs_mounts
from spark_deploy.plan.kv_cache import context_tokens
from spark_deploy.plan.resolve import Resolved
from spark_deploy.plan.types import (
    ImagePlan,
    ManagedFile,
    ModelPlan,
    Ports,
    ScheduledPlan,
    ServicePlan,
)

_RESTART_DELAY_S = 60
_INTERVAL_MARGIN_S = 600
_BURST = 3  # failed starts
_STARTING_STEPS = 3  # ExecStartPre, ExecStart, ExecStartPost: systemd limits each separately
_STOPPING_STEPS = 3  # ExecStop, the signals, ExecStopPost: likewise
# The counters include a prompt only after it has been read completely. This is far below a Spark's
# speed (3,317 tokens/s were published for two at 2K), because long contexts slow reading down.
_SLOWEST_PROMPT_TOKENS_PER_S = 1000
_HOT_CELSIUS = 90  # boards switch off near 105 °C without an event
_BENCH_WORSE_PERCENT = 15


def limits_drop_in(release: Release) -> str:
    """Return the drop-in with time and start limits, which depend on the load time."""
    start = start_limits(release)
    directories = (mount.source for mount in release.engine.mounts)
    return (
        "[Unit]\n"
        f"{needs_mounts(*directories, engine_dir(release.service))}"
        f"StartLimitIntervalSec={start['interval_s']}\n"
        f"StartLimitBurst={start['burst']}\n"
        "[Service]\n"
        f"RestartSec={start['delay_s']}\n"
        f"TimeoutStartSec={_start_step_s(release)}\n"
        f"TimeoutStopSec={_stop_step_s(release)}\n"
    )


def start_limits(release: Release) -> dict[str, float]:
    """Return the restart delay, and the number and interval of starts after which systemd gives up.

    The interval is long enough for starts in which every step times out; such an engine must not
    restart indefinitely. After as many crashes in this interval, a working engine stops too.
    """
    starting_s = _STARTING_STEPS * _start_step_s(release)
    stopping_s = _STOPPING_STEPS * _stop_step_s(release)
    interval_s = _BURST * (starting_s + stopping_s + _RESTART_DELAY_S) + _INTERVAL_MARGIN_S
    return {"delay_s": _RESTART_DELAY_S, "burst": _BURST, "interval_s": interval_s}


def _start_step_s(release: Release) -> float:
    return release.timeouts.start_s + release.memory.wait_s + 120


def _stop_step_s(release: Release) -> float:
    return release.timeouts.stop_s + 60


def unit_and_command_files(units: tuple[ManagedFile, ...]) -> tuple[ManagedFile, ...]:
    return (*units, _wrapper(tool.CHECK_TOOL, f" {tool.CHECK}"), _wrapper(tool.TOOL, ""))


def _wrapper(name: str, subcommand: str) -> ManagedFile:
    path = f"{tool.COMMANDS_DIR}/{name}"
    # Only root can read sockets, proofs and journals.
    as_root = f'[ "$(id -u)" = 0 ] || exec sudo -- {path} "$@"'
    text = f'#!/bin/sh\n{as_root}\nexec {tool.HOST_TOOL}{subcommand} "$@"\n'
    return ManagedFile(path, text.encode(), 0o755)


def release_files(plan: ServicePlan) -> tuple[ManagedFile, ...]:
    scheduled = {change.release.name: change.release for change in plan.schedule}
    scheduled.pop(plan.release.name, None)
    files = (file for release in (*scheduled.values(), plan.release) for file in _files(release))
    return tuple({file.path: file for file in files}.values())


def _files(release: Release) -> tuple[ManagedFile, ...]:
    return (
        ManagedFile(release_file(release.name), to_json(release).encode()),
        _socket_mount(release.service),
        *_cluster_drop_ins(release),
        ManagedFile(
            f"{units.drop_in_dir(release.serve_unit)}/50-release.conf",
            limits_drop_in(release).encode(),
        ),
    )


def _cluster_drop_ins(release: Release) -> Iterator[ManagedFile]:
    """Yield drop-ins that limit network access to cluster members."""
    if release.cluster is not None:
        addresses = " ".join(member.address for member in release.cluster.members)
        path = f"{units.drop_in_dir(units.WATCH.unit(release.name))}/50-cluster.conf"
        yield ManagedFile(path, f"[Service]\nIPAddressAllow={addresses}\n".encode())
        # "-+": run as root, and ignore a failure.
        up, down = (tool.command_line(tool.FENCE, verb, release.name) for verb in ("up", "down"))
        text = f"[Service]\nExecStartPre=-+{up}\nExecStopPost=-+{down}\n"
        yield ManagedFile(f"{units.drop_in_dir(release.serve_unit)}/50-cluster.conf", text.encode())


def _socket_mount(service: str) -> ManagedFile:
    """Return the mount unit of the socket folder, which limits size and symbolic links."""
    folder = engine_dir(service)
    text = (
        "[Unit]\n"
        f"Description=Socket folder of the Spark engine {service}\n"
        "[Mount]\n"
        f"What=tmpfs\nWhere={folder}\nType=tmpfs\n"
        "Options=mode=0700,size=256k,nr_inodes=64,nosuid,nodev,noexec,nosymfollow\n"
    )
    return ManagedFile(f"{units.UNITS_DIR}/{units.mount_unit(folder)}", text.encode())


def plan_release(
    service: str, resolved: Resolved, artifacts: ModelPlan, fabric: Mapping[str, Ports]
) -> Release:
    model, profile = resolved.model, resolved.profile
    settings, memory, serve = resolved.settings, resolved.memory, resolved.settings.serve
    image, tree = artifacts.image, artifacts.served_checkpoint
    names = serve.names_of(model.name)
    trees = [(part.source.dir, part.source.digest, part.target) for part in artifacts.companions]
    if artifacts.vocabulary:
        order = artifacts.vocabulary.order
        trees.append((order.out, order.digest, engine.VOCABULARY_MOUNT))
    middleware, defaults = _request_defaults(serve, profile, plugin=image.plugin)
    release = Release(
        service=service,
        model=model.name,
        profile=profile.name,
        names=(*names, *model.adapters),
        image=contract.Image(
            tag=image.tag,
            digest_label=image.digest if image.plugin else None,
            base=image.base,
            plugin=image.context_digest[:12],
        ),
        tree=Tree(tree.dir, tree.digest),
        companions=tuple(Tree(path, digest) for path, digest, _ in trees),
        engine=contract.Engine(
            argv=(*engine.engine_arguments(model, profile, memory, names), *middleware),
            env={**engine.engine_environment(profile, image, serve.start_timeout_s), **defaults},
            mounts=(
                Mount(tree.dir, engine.MODEL_MOUNT, True),
                *(Mount(path, target, True) for path, _, target in trees),
                Mount(artifacts.cache_dir, engine.CACHE_MOUNT, False),
            ),
            docker_args=engine.container_arguments(settings.engine.cpuset_cpus),
            user=ENGINE_USER,
            max_sequences=profile.limits.max_sequences,
            kv_cache_bytes=profile.kv_cache.size_bytes,
        ),
        memory=contract.Memory(
            memory.needed_bytes, settings.memory.start_wait_s, memory.floor_bytes
        ),
        timeouts=contract.Timeouts(serve.start_timeout_s, serve.stop_timeout_s, serve.drain_s),
        check=_check_plan(resolved, plugin=image.plugin),
        watch=contract.Watch(
            # Reading the longest prompt must not reach the limit.
            max(
                settings.watch.stall_s,
                -(-context_tokens(model, profile) // _SLOWEST_PROMPT_TOKENS_PER_S),
            ),
            settings.watch.interval_s,
            _HOT_CELSIUS,
        ),
    )
    if settings.cluster.hosts:
        release = cluster_release(release, settings, fabric)
        if profile.engine_mode == "native":  # the other mode uses no GPU library
            forbidden = (*release.check.log_forbidden, engine.DEADLOCKING_NCCL_LINE)
            release = replace(release, check=replace(release.check, log_forbidden=forbidden))
    digest = digest_of({**to_plain(release), "restart": start_limits(release)})
    return replace(release, name=units.release_name(service, digest), digest=digest)


def _request_defaults(
    serve: ServeSettings, profile: Profile, *, plugin: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the engine's arguments and variables for request defaults per served model name."""
    if not serve.defaults:
        return (), {}
    if not plugin:
        message = f"profile {profile.name} lacks the plugin, which applies request defaults"
        fix = "choose a profile with plugin: true, or remove serve.defaults"
        raise PlanError.single("serve.defaults", message, fix)
    values = {name: defaults.request for name, defaults in serve.defaults.items()}
    variable = {"SPARK_REQUEST_DEFAULTS": json.dumps(values, sort_keys=True)}
    return ("--middleware", "spark_vllm.served_names.RequestDefaults"), variable


def cache_dir(settings: Settings, profile: Profile, image: ImagePlan) -> str:
    """Return the folder of compile caches; each release has a separate folder in it.

    The path depends on the base image and the number of drafts, which the engine's cache key lacks.
    It does not depend on the plugin, because the cache keys of compilers include the source.
    """
    drafts = profile.speculation.tokens if profile.speculation else 0
    return f"{settings.paths.cache_dir}/{units.cache_name(image.base, drafts)}"


def _check_plan(resolved: Resolved, *, plugin: bool) -> CheckPlan:
    model, profile, settings = resolved.model, resolved.profile, resolved.settings
    required, forbidden = engine.required_and_forbidden_lines(model, profile, plugin=plugin)
    plain_model = model if isinstance(model, PlainModel) else None
    pools = plain_model is not None and plain_model.pools
    task = plain_model.task if plain_model else "chat"
    has_vision = (
        model.architecture.vision_bytes > 0 if isinstance(model, HybridModel) else model.vision
    )
    metadata = plain_model.metadata if plain_model and task == "embedding" else None
    longest = context_tokens(model, profile)
    return CheckPlan(
        timeout_s=settings.check.timeout_s,
        max_model_len=longest,
        questions=tuple(
            contract.Question(
                question.text, question.expect, question.max_tokens, question.thinking
            )
            for question in check_questions(model)
        ),
        copy=tuple(model.check.copy),
        tool_call=model.check.tool_call and model.parsers.tool_call is not None,
        reasoning=model.check.reasoning and model.parsers.reasoning is not None,
        repeat=model.check.repeat and not pools,
        conversation=model.check.conversation,
        # Only for `spark-check --deep`, because such a prompt takes minutes.
        needle=None if pools else contract.Needle(longest * 3 // 4),
        image=profile.vision and has_vision,
        acceptance_floor=profile.check.acceptance_floor if profile.speculation else None,
        # The first turn must fill a block: only whole blocks are cached.
        prefix=contract.Prefix(resolved.memory.block_tokens)
        if profile.check.prefix_reuse
        else None,
        log_required=required,
        log_forbidden=forbidden,
        portable=plugin and profile.engine_mode == "portable",
        metrics_required=dict(profile.check.metrics_required),
        bench=contract.Bench(settings.check.bench_s, _BENCH_WORSE_PERCENT)
        if task == "chat"
        else None,
        task=task,
        sound=plain_model is not None and plain_model.audio,
        # Dimensions of the embedding; a layer after the model may change them.
        width=metadata.width if metadata else None,
    )


def timer_files(schedule: Sequence[ScheduledPlan]) -> tuple[ManagedFile, ...]:
    """Return a timer for each scheduled release.

    A timer starts the same unit as a deploy, with check and rollback. Times that pass while the
    host is off are skipped.
    """
    calendars: dict[str, str] = {}
    for change in schedule:
        name = change.release.name
        calendars[name] = calendars.get(name, "") + f"OnCalendar={change.at}\n"
    files = []
    for name, calendar in calendars.items():
        text = (
            f"[Unit]\nDescription=Schedule for switching the Spark service to {name}\n\n"
            f"[Timer]\n{calendar}Unit={units.SWITCH.unit(name)}\nAccuracySec=10s\n\n"
            "[Install]\nWantedBy=timers.target\n"
        )
        files.append(ManagedFile(f"{units.UNITS_DIR}/{units.HOURS.unit(name)}", text.encode()))
    return tuple(files)
