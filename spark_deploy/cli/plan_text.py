"""The plan of a host as text: a summary, or every part with ``spark-deploy plan -v``."""

import hashlib
import itertools
import shlex
from collections.abc import Iterable, Iterator

from spark_contract.release import Release
from spark_contract.tool import COMPILING

from spark_deploy.cli.hosts import ESTIMATED_COMMIT
from spark_deploy.config.catalog.architecture import Architecture
from spark_deploy.config.catalog.model import HybridModel, Model
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.lock.resolve import format_size
from spark_deploy.lock.types import LockedSource
from spark_deploy.plan.gateway import base_urls
from spark_deploy.plan.host import disk_total, plan_document
from spark_deploy.plan.kv_cache import TURBOQUANT
from spark_deploy.plan.memory import NGRAM_CACHE_BYTES, gib
from spark_deploy.plan.speed import (
    TOLERANCE,
    Calibration,
    Speed,
    best_speedup,
    compute_speed,
    first_token_s,
    next_turn_s,
)
from spark_deploy.plan.types import CheckpointPlan, GatewayPlan, HostPlan, ServicePlan, SourcePlan

RATES_MB_PER_S = (25, 100)
UNMEASURED = Calibration()
# Tokens in a long coding session, and in a turn.
_SESSION_TOKENS, _TURN_TOKENS = 130_000, 1000
_MAX_ARGUMENT_CHARACTERS = 1000
_CHECKS = {
    "tool_call": "tool call",
    "reasoning": "reasoning",
    "repeat": "repeat",
    "conversation": "growing conversation",
    "image": "images",
}


def row(title: str, text: str) -> str:
    return f"  {title:<11} {text}"


def plan_text(
    plan: HostPlan,
    model: Model,
    profile: Profile,
    *,
    verbose: bool,
    present: str = "",
    peer: str = "",
    calibration: Calibration = UNMEASURED,
) -> Iterator[str]:
    """Yield the summary of a plan, or the whole plan if ``verbose``.

    ``present`` describes files on the host; ``peer`` is the host to copy from.
    """
    yield from summary_lines(plan, profile, peer)
    if present:
        yield row("on the host", present)
    if verbose:
        yield from plan_lines(plan, model, profile, calibration)
        return
    yield from itertools.islice(speed_lines(plan, model, profile, calibration), 2)
    yield row("more", "-v prints downloads, files, unit and engine arguments")


def download_peer(plan: HostPlan, earlier: Iterable[HostPlan]) -> str:
    """Return the first earlier host that downloads all files and images of the plan, or ""."""
    needed = _download_sizes(plan).keys()
    return next((other.host for other in earlier if needed <= _download_sizes(other).keys()), "")


def _download_sizes(plan: HostPlan) -> dict[tuple[str, str], int]:
    images = {("image", served.image.base): served.image.size_bytes for served in plan.served}
    sources = (source for served in plan.served for source in served.sources)
    return images | {("source", source.digest): source.size_bytes for source in sources}


def summary_lines(plan: HostPlan, profile: Profile, peer: str) -> Iterator[str]:
    verdict = "may not fit: some sizes are unknown" if plan.memory.unknown else "fits"
    yield f"{plan.host}: {plan.model} with {plan.profile} {verdict}"
    yield row("serves", f"{', '.join(plan.release.names)} {_address_text(plan)}")
    yield row("downloads", _peer_downloads_text(plan, peer) if peer else _downloads_text(plan))
    peak_bytes, after_bytes = disk_total(plan.disk)
    sizes = f"{format_size(after_bytes)} in total, {format_size(peak_bytes)} at peak"
    if any(not source.size_bytes for served in plan.served for source in served.sources):
        sizes += ", not counting files of unknown size"
    yield row("disk", sizes)
    yield row("memory", _memory_summary(plan, profile))
    for text in plan.memory.unknown:
        yield row("UNKNOWN", text)
    if not profile.proven:
        yield row("UNPROVEN", f"profile {profile.name} has not been tested end to end")
    requested, used = profile.limits.memory_fraction, plan.memory.memory_fraction
    if used < requested and not profile.kv_cache.size_bytes:
        text = f"memory share lowered from {requested:g} to {used:g} to keep the reserve free"
        yield row("", text)
    if not plan.release.check.portable:
        repeats = "repeated when the engine's base image or the driver changes"
        yield row("start", f"{COMPILING}; {repeats}")
    for service in plan.services:
        urls = ", ".join(url for url, _ in base_urls(service.gateway))
        used_memory = gib(service.memory.memory_fraction * service.memory.total_bytes)
        served = f"{service.model} with {service.profile}"
        yield row("service", f"{service.release.service}: {served} at {urls}, uses {used_memory}")
    for entry in plan.served:
        yield from (row("WARNING", warning) for warning in entry.warnings)


def _address_text(plan: HostPlan) -> str:
    urls = ", ".join(f"{url} ({clients})" for url, clients in base_urls(plan.gateway))
    cluster = plan.release.cluster
    members = [member.host for member in cluster.members] if cluster else []
    if not members:
        return f"at {urls}"
    if plan.host == members[0]:
        return f"at {urls}, together with {', '.join(members[1:])}"
    return f"together with {members[0]}, which serves clients"


def _downloads_text(plan: HostPlan) -> str:
    sizes = _download_sizes(plan)
    image_bytes = sum(size_bytes for (kind, _), size_bytes in sizes.items() if kind == "image")
    file_bytes = sum(sizes.values()) - image_bytes
    images = f"{format_size(image_bytes)} of images, minus files already on the host"
    if not file_bytes:
        return f"files of unknown size and {images}"
    total_mb = (file_bytes + image_bytes) / 1e6
    slow, fast = (_duration_text(total_mb / rate) for rate in RATES_MB_PER_S)
    build = "; then builds the checkpoint" if plan.checkpoint else ""
    files = f"up to {format_size(file_bytes)} of files"
    return f"{files} and {images}: {fast} at 100 MB/s, {slow} at 25 MB/s{build}"


def _peer_downloads_text(plan: HostPlan, peer: str) -> str:
    text = f"copies files and images from {peer}"
    donor_bytes = plan.checkpoint.donor_bytes if plan.checkpoint else 0
    return f"{text}; {format_size(donor_bytes)} from the hub" if donor_bytes else text


def _duration_text(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _memory_summary(plan: HostPlan, profile: Profile) -> str:
    memory = plan.memory
    capacity = "capacity unknown until the first start"
    if memory.full_context_users is not None:
        context = f"{plan.release.check.max_model_len:,} tokens"
        capacity = f"room for {memory.full_context_users:.1f} requests of {context}"
    return (
        f"engine {gib(memory.engine_bytes)}, KV cache {gib(memory.kv_cache_bytes)} ({capacity}; "
        f"{profile.limits.max_sequences} concurrent), free {gib(memory.free_bytes)}"
    )


def plan_lines(
    plan: HostPlan, model: Model, profile: Profile, calibration: Calibration = UNMEASURED
) -> Iterator[str]:
    yield row("release", plan.release.name)
    yield row("model", model.summary)
    yield row("profile", profile.summary)
    for source in plan.sources:
        yield row("download", _source_text(source))
        if plan.checkpoint and not plan.checkpoint.keep_base:
            donor_bytes = plan.checkpoint.donor_bytes
            donor = f" and {format_size(donor_bytes)} of FP8 tensors" if donor_bytes else ""
            yield row(
                "",
                "the host removes the download after the built checkpoint has passed its check; "
                f"a rebuild downloads {format_size(plan.checkpoint.base.size_bytes)}{donor} again",
            )
    if base := plan.requantized:
        yield row(
            "",
            "run `spark-deploy add --requantize`, which quantizes the model on the host "
            f"to {format_size(base.size_bytes)} in {base.dir} with AutoRound "
            f"({base.build.iters} steps, about {gib(base.build.memory_bytes)} of memory)",
        )
    yield from _checkpoint_lines(plan.checkpoint)
    layer = "with our plugin layer" if plan.image.plugin else "unchanged"
    image_size = format_size(plan.image.size_bytes)
    yield row("image", f"{plan.image.base}, {image_size} compressed, {layer}")
    for number, entry in enumerate(plan.ready):
        folder = entry.checkpoint.dir if entry.checkpoint else entry.sources[0].dir
        text = f"{entry.model} with {entry.profile}: {folder}, image {entry.image.tag}"
        yield row("" if number else "kept ready", text)
    yield from _memory_lines(plan, profile)
    yield from speed_lines(plan, model, profile, calibration)
    yield from _disk_lines(plan)
    yield row("engine", _engine_command(plan.release))
    if cluster := plan.release.cluster:
        for number, member in enumerate(cluster.members):
            yield row("" if number else "cluster", f"{member.host}: {shlex.join(member.argv)}")
        yield row("", f"{cluster.head.host} serves clients; the workers only compute")
        text = "the release name will change once the deploy has read the members' addresses"
        yield row("", text)
    unit = plan_document(plan)["unit"]
    yield row("unit", f"{unit['name']} with {unit['drop_in']}:")
    yield row("", "; ".join(line for line in unit["lines"] if not line.startswith("[")))
    yield from _serving_lines(plan.release, plan.gateway)
    for service in plan.services:
        yield from _service_lines(service)


def _service_lines(plan: ServicePlan) -> Iterator[str]:
    yield row("service", f"{plan.release.service}, release {plan.release.name}")
    for source in plan.sources:
        yield row("download", _source_text(source))
    yield row("image", plan.image.base)
    tokens = plan.memory.kv_tokens
    cache = gib(plan.memory.kv_cache_bytes) + ("" if tokens is None else f" of {tokens:,} tokens")
    engine = gib(plan.memory.engine_bytes)
    yield row("memory", f"weights, drafter and runtime {engine}, KV cache {cache}")
    yield row("engine", _engine_command(plan.release))
    yield from _serving_lines(plan.release, plan.gateway)


def _engine_command(release: Release) -> str:
    return shlex.join(["vllm", "serve", *map(shorten_argument, release.engine.argv)])


def shorten_argument(argument: str) -> str:
    """Return the argument, or its digest if it is long."""
    if "\n" not in argument and len(argument) < _MAX_ARGUMENT_CHARACTERS:
        return argument
    digest = hashlib.sha256(argument.encode()).hexdigest()[:12]
    return f"<{len(argument.splitlines())} lines, sha256 {digest}>"


def _source_text(source: SourcePlan) -> str:
    return f"{source.locked.repo} {_commit_text(source.locked)}, {format_size(source.size_bytes)}"


def _commit_text(locked: LockedSource) -> str:
    if locked.commit == ESTIMATED_COMMIT:
        return "(estimated, not locked)"
    return f"at {locked.commit[:12]}"


def _checkpoint_lines(checkpoint: CheckpointPlan | None) -> Iterator[str]:
    if checkpoint is None:
        yield row("checkpoint", "the downloaded checkpoint, unchanged")
        return
    build = checkpoint.build
    parts = f"{build.layout}; shared experts {build.shared_experts}, head {build.head}"
    output_size = format_size(checkpoint.output_bytes)
    yield row("checkpoint", f"{checkpoint.dir}, {output_size} new ({parts})")
    if donor := checkpoint.donor:
        yield row(
            "",
            f"the build reads byte ranges of {donor.repo} {_commit_text(donor)} without "
            "storing any files",
        )


def _memory_lines(plan: HostPlan, profile: Profile) -> Iterator[str]:
    memory = plan.memory
    vision = f" ({gib(memory.vision_bytes)} for vision)" if memory.vision_bytes else ""
    yield row(
        "memory",
        f"{gib(memory.total_bytes)} = weights {gib(memory.weights_bytes)}{vision} + drafter "
        f"{gib(memory.drafter_bytes)} + runtime {gib(memory.graphs_bytes)} + KV cache "
        f"{gib(memory.kv_cache_bytes)} + free {gib(memory.free_bytes)}",
    )
    yield row(
        "",
        f"free: {gib(memory.reserve_bytes)} for the system and other programs "
        f"(memory.reserve_gib), {gib(memory.free_bytes - memory.reserve_bytes)} "
        "for startup peaks and the file cache; "
        f"the watchdog stops the engine if less than {gib(memory.floor_bytes)} is free",
    )
    if profile.ngram_table == "file":
        cached = f"{gib(NGRAM_CACHE_BYTES)} of cached n-gram table rows"
        yield row("", f"weights include {cached}; the engine reads the other rows from disk")
    elif profile.ngram_table:
        yield row("", f"weights include the n-gram table ({profile.ngram_table})")
    for text in memory.unknown:
        yield row("", f"UNKNOWN: {text}; the engine reports this value on the first start")
    if memory.measured_by:
        yield row("", f"KV cache size per token measured by {memory.measured_by}")
    context = plan.release.check.max_model_len
    if memory.kv_tokens is None:
        return
    yield row(
        "",
        f"KV cache: {memory.kv_tokens:,} tokens "
        f"for {profile.limits.max_sequences} concurrent requests; "
        f"the engine reports {memory.counted_tokens(context):,} tokens, "
        f"enough for {memory.full_context_users:.1f} requests of {context:,} tokens",
    )
    if profile.engine_mode != "native":
        yield row("", "portable engines use larger cache blocks, so they report fewer tokens")


def speed_lines(
    plan: HostPlan, model: Model, profile: Profile, calibration: Calibration = UNMEASURED
) -> Iterator[str]:
    unsupported = _unsupported_by_speed_model(plan, model, profile)
    if unsupported or not isinstance(model, HybridModel):
        yield row("speed", f"not computed for {unsupported}")
        return
    shape, requests = model.architecture, profile.limits.max_sequences
    context, factor = plan.release.check.max_model_len, calibration.factor
    single = compute_speed(shape, profile)
    text = f"{_speed_range(single, factor)} tokens/s for one request, "
    if profile.kv_cache.dtype in TURBOQUANT:
        text += "less in long contexts (not computed for TurboQuant)"
    else:
        full = compute_speed(shape, profile, context_tokens=context)
        text += f"{_speed_range(full, factor)} after {context:,} tokens"
    if requests > 1:
        total = compute_speed(shape, profile, requests=requests)
        text += f", {_speed_range(total, factor)} in total for {requests}"
    basis = "fitted to published figures, not measured on a Spark"
    if profile.ngram_table == "file":
        basis += "; excludes disk reads"
    if count := calibration.reports:
        basis = f"scaled by {factor:.2f}, based on {count} Spark report{'s' if count > 1 else ''}"
    yield row("speed", f"{text} (computed, {basis})")
    yield row("prompts", f"first token after {_first_token_text(plan, shape, profile)}")
    largest = sorted(single.parts_s, key=lambda part: -part[1])[:4]
    shares = ", ".join(f"{name} {seconds / single.step_s:.0%}" for name, seconds in largest)
    yield row(
        "",
        f"a step takes {single.step_s * 1000:.0f} ms "
        f"and yields {single.tokens_per_step:.2f} tokens: {shares}",
    )
    speedup = best_speedup(model, profile)
    text = "no other setting is faster by 1 % or more"
    if speedup:
        text = f"fastest other setting: {speedup.setting}, about +{speedup.gain:.0%}"
    yield row("", text)


def _first_token_text(plan: HostPlan, model: Architecture, profile: Profile) -> str:
    session = min(_SESSION_TOKENS, plan.release.check.max_model_len // 2)
    prompt_s = first_token_s(model, session)
    turn_s = next_turn_s(model, profile, plan.memory.block_tokens, session, _TURN_TOKENS)
    caching = "with" if profile.prefix_caching else "without"
    return (
        f"{prompt_s:.0f} s for a {session:,}-token prompt, "
        f"{turn_s:.0f} s for the next turn of {_TURN_TOKENS:,} tokens "
        f"({caching} prefix caching; computed)"
    )


def _unsupported_by_speed_model(plan: HostPlan, model: Model, profile: Profile) -> str:
    if not isinstance(model, HybridModel):
        return "models without an architecture file"
    if profile.engine_mode != "native":
        return "engines that do not use the Spark kernels"
    cluster = plan.release.cluster  # the computed speed excludes network traffic
    return f"{len(cluster.members)} Sparks as one server" if cluster else ""


def _speed_range(speed: Speed, factor: float) -> str:
    tokens_per_s = speed.tokens_per_s * factor
    return f"{tokens_per_s * (1 - TOLERANCE):.0f} to {tokens_per_s * (1 + TOLERANCE):.0f}"


def _disk_lines(plan: HostPlan) -> Iterator[str]:
    for number, use in enumerate(plan.disk):
        peak = (
            f", {format_size(use.peak_bytes)} at peak" if use.peak_bytes != use.after_bytes else ""
        )
        text = f"{format_size(use.after_bytes):>9}{peak} for {use.label} in {use.path}"
        yield row("" if number else "disk", text)
    peak_bytes, after_bytes = disk_total(plan.disk)
    yield row(
        "",
        f"{format_size(after_bytes):>9} in total on an empty host, "
        f"{format_size(peak_bytes)} at peak; "
        "`spark-deploy doctor` checks the free space of each filesystem",
    )


def _serving_lines(release: Release, gateway: GatewayPlan) -> Iterator[str]:
    urls = ", ".join(f"{url} ({clients})" for url, clients in base_urls(gateway))
    names = ", ".join(release.names)
    yield row("serves", f"{urls}, serving {names}; API key in {gateway.settings.key_path}")
    check = release.check
    parts = [f"{len(check.questions)} questions", f"{len(check.copy)} copies"]
    parts += [text for name, text in _CHECKS.items() if getattr(check, name)]
    if check.acceptance_floor:
        parts.append(f"draft acceptance of {check.acceptance_floor} or more")
    if check.prefix:
        parts.append("prefix caching in a growing conversation")
    if check.portable:
        parts.append("PORTABLE MODE: every layer is dequantized; results are not valid for a Spark")
    yield row("check", ", ".join(parts))
