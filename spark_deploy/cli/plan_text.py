"""Every part of the plan of a host, as text: what ``spark-deploy plan -v`` prints."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator

from spark_contract.release import Release

from spark_deploy.cli.hosts import ESTIMATED_COMMIT
from spark_deploy.cli.plan_summary import row as _row
from spark_deploy.config.catalog.model import HybridModel, Model
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.checkout import page
from spark_deploy.lock.resolve import size
from spark_deploy.lock.types import LockedSource
from spark_deploy.plan.disk import disk_total
from spark_deploy.plan.gateway import base_urls
from spark_deploy.plan.memory import gib
from spark_deploy.plan.release import document
from spark_deploy.plan.speed import TOLERANCE, Calibration, Speed, next_lever, speed_of
from spark_deploy.plan.types import (
    CheckpointPlan,
    GatewayPlan,
    HostPlan,
    MemoryPlan,
    RequantizedPlan,
    ServicePlan,
)

_LONG_WORD = 1000
UNMEASURED = Calibration()


def lines(
    plan: HostPlan, model: Model, profile: Profile, measured: Calibration = UNMEASURED
) -> Iterator[str]:
    """Yield every part of the plan of one host; the profile is as this host serves it."""
    yield _row("release", plan.serve.name)
    yield _row("model", model.summary)
    yield _row("profile", profile.summary)
    for source in plan.sources:
        commit = _identity(source.locked.commit)
        yield _row("download", f"{source.locked.repo} {commit}, {size(source.size_bytes)}")
        if plan.checkpoint and not plan.checkpoint.keep_base:
            yield _row("", _without_base(plan.checkpoint))
    if plan.requantized:
        yield _row("", _quantised(plan.requantized))
    yield _row("checkpoint", _checkpoint(plan))
    if plan.checkpoint and plan.checkpoint.donor:
        yield _row("", _donor(plan.checkpoint.donor))
    layer = "with our plugin layer" if plan.image.plugin else "unchanged"
    yield _row("image", f"{plan.image.base}, {size(plan.image.size_bytes)} compressed, {layer}")
    yield from _ready(plan)
    yield from _memory(plan, profile)
    yield from speed(plan, model, profile, measured)
    yield from _disk(plan)
    yield _row("engine", shlex.join(["vllm", "serve", *map(_word, plan.serve.engine.argv)]))
    yield from _cluster(plan.serve)
    yield from _unit(plan)
    yield from _service(plan.serve, plan.gateway)
    for one in plan.services:
        yield from _beside(one)


def _word(word: str) -> str:
    """Return an argument, or of a text of many lines what it is known by."""
    if "\n" not in word and len(word) < _LONG_WORD:
        return word
    digest = hashlib.sha256(word.encode()).hexdigest()[:12]
    return f"<{len(word.splitlines())} lines, sha256 {digest}>"


def _beside(one: ServicePlan) -> Iterator[str]:
    """Yield every part of a service beside the main one."""
    yield _row("service", f"{one.serve.service}, release {one.serve.name}")
    for source in one.sources:
        commit = _identity(source.locked.commit)
        yield _row("download", f"{source.locked.repo} {commit}, {size(source.size_bytes)}")
    yield _row("image", one.image.base)
    tokens = one.memory.kv_tokens
    cache = gib(one.memory.kv_cache_bytes) + ("" if tokens is None else f" of {tokens:,} tokens")
    yield _row(
        "memory", f"weights, drafter and runtime {gib(one.memory.engine_bytes)}, KV cache {cache}"
    )
    yield _row("engine", shlex.join(["vllm", "serve", *map(_word, one.serve.engine.argv)]))
    yield from _service(one.serve, one.gateway)


def _identity(commit: str) -> str:
    return "(estimated, not locked)" if commit == ESTIMATED_COMMIT else f"at {commit[:12]}"


def _checkpoint(plan: HostPlan) -> str:
    built = plan.checkpoint
    if built is None:
        return "the downloaded tree is served as it is"
    return (
        f"{built.dir}, {size(built.output_bytes)} new ({built.order.layout}; shared experts "
        f"{built.order.shared_experts}, head {built.order.head})"
    )


def _quantised(made: RequantizedPlan) -> str:
    return (
        f"quantised on the host to {size(made.size_bytes)} in {made.dir}: AutoRound, "
        f"{made.order.iters} steps, {gib(made.order.memory_bytes)} of memory (estimated); "
        "`spark-deploy add --requantize` does it"
    )


def _without_base(built: CheckpointPlan) -> str:
    donor = f" and {size(built.donor_bytes)} of the donor" if built.donor_bytes else ""
    return (
        "not fetched while the tree below is whole, removed once that is proven and serves; "
        f"a rebuild would fetch {size(built.base.size_bytes)}{donor} again"
    )


def _donor(donor: LockedSource) -> str:
    return f"byte ranges of {donor.repo} {_identity(donor.commit)} are read, not kept"


def _ready(plan: HostPlan) -> Iterator[str]:
    title = "kept ready"
    for pair in plan.ready:
        tree = pair.checkpoint.dir if pair.checkpoint else pair.sources[0].dir
        yield _row(title, f"{pair.model} with {pair.profile}: {tree}, image {pair.image.tag}")
        title = ""


def _memory(plan: HostPlan, profile: Profile) -> Iterator[str]:
    memory = plan.memory
    vision = f" (vision {gib(memory.vision_bytes)} of them)" if memory.vision_bytes else ""
    yield _row(
        "memory",
        f"{gib(memory.total_bytes)} = weights {gib(memory.weights_bytes)}{vision} + drafter "
        f"{gib(memory.drafter_bytes)} + runtime {gib(memory.graphs_bytes)} + KV cache "
        f"{gib(memory.kv_cache_bytes)} + left {gib(memory.left_bytes)}",
    )
    yield _row("", _left_for(memory))
    for what in memory.unknown:
        yield _row("", f"NOT KNOWN: {what}; the engine says it at its start")
    if memory.counted_by:
        yield _row("", f"a token of the KV cache is as an engine counted it: {memory.counted_by}")
    context = plan.serve.check.max_model_len
    if memory.kv_tokens is None:
        return
    yield _row(
        "",
        f"KV cache of {memory.kv_tokens:,} tokens for {profile.limits.max_sequences} requests at "
        f"once; {memory.counted_tokens(context):,} as an engine counts: room for "
        f"{memory.full_context_users:.1f} requests of {context:,}",
    )
    if profile.engine_mode != "native":
        yield _row("", "an engine without a Spark's kernels has larger blocks, and counts less")


def speed(
    plan: HostPlan, model: Model, profile: Profile, measured: Calibration = UNMEASURED
) -> Iterator[str]:
    """Say how fast it would be, or why that is not known."""
    why = _not_computed(plan, model, profile)
    if why or not isinstance(model, HybridModel):
        yield _row("speed", f"not computed for {why}")
        return
    shape, most = model.architecture, profile.limits.max_sequences
    one = speed_of(shape, profile)
    full = plan.serve.check.max_model_len
    deep = speed_of(shape, profile, context_tokens=full)
    times = measured.factor
    said = f"{_range(one, times)} tokens/s for one request, {_range(deep, times)} behind "
    said += f"{full:,} tokens"
    if most > 1:
        said += f", {_range(speed_of(shape, profile, requests=most), times)} in all for {most}"
    known = "measured on no Spark"
    if count := measured.reports:
        known = f"times {times:.2f} by {count} report{'s' if count > 1 else ''} of a Spark"
    yield _row("speed", f"{said} (computed, {known}: {page('speed')})")
    largest = sorted(one.parts_s, key=lambda part: -part[1])[:4]
    shares = ", ".join(f"{name} {seconds / one.step_s:.0%}" for name, seconds in largest)
    yield _row(
        "",
        f"a step takes {one.step_s * 1000:.0f} ms and yields {one.tokens_per_step:.2f} tokens: "
        f"{shares}",
    )
    lever = next_lever(model, profile)
    told = (
        f"{lever.setting}, about {lever.gain:.0%} more" if lever else "no setting gains a percent"
    )
    yield _row("", f"next lever: {told}")


def _not_computed(plan: HostPlan, model: Model, profile: Profile) -> str:
    if not isinstance(model, HybridModel):
        return "models that are not ours"
    if profile.engine_mode != "native":
        return "an engine without a Spark's kernels"
    cluster = plan.serve.cluster  # what goes between hosts is not in the arithmetic
    return f"{len(cluster.members)} Sparks as one server" if cluster else ""


def _range(speed: Speed, times: float) -> str:
    low, high = (speed.tokens_per_s * times * (1 + side * TOLERANCE) for side in (-1, 1))
    return f"{low:.0f} to {high:.0f}"


def _left_for(memory: MemoryPlan) -> str:
    """Say what the memory beside the engine is for."""
    peaks = memory.left_bytes - memory.reserve_bytes
    return (
        f"left for the system and other programs {gib(memory.reserve_bytes)} (memory.reserve_gib), "
        f"for peaks of a start and the file cache {gib(peaks)}; with less than "
        f"{gib(memory.floor_bytes)} available the engine is stopped (memory.floor_gib)"
    )


def _disk(plan: HostPlan) -> Iterator[str]:
    title = "disk"
    for use in plan.disk:
        peak = f", {size(use.peak_bytes)} on the way" if use.peak_bytes != use.after_bytes else ""
        yield _row(title, f"{size(use.after_bytes):>9}{peak} for {use.what} in {use.path}")
        title = ""
    peak_bytes, after_bytes = disk_total(plan.disk)
    yield _row(
        "",
        f"{size(after_bytes):>9}, at most {size(peak_bytes)} on the way, in all on a "
        "bare host; `doctor` compares with each filesystem",
    )


def _cluster(release: Release) -> Iterator[str]:
    """Say what each member is told beside the rest; a plan made here knows no addresses yet."""
    title = "cluster"
    for member in release.cluster.members if release.cluster else ():
        yield _row(title, f"{member.host}: {shlex.join(member.argv)}")
        title = ""
    if release.cluster:
        yield _row("", f"{release.cluster.head.host} answers clients, the others compute for it")
        yield _row("", "a deploy asks the members for their addresses and names the release anew")


def _unit(plan: HostPlan) -> Iterator[str]:
    unit = document(plan)["unit"]
    yield _row("unit", f"{unit['name']} with {unit['drop_in']}:")
    yield _row("", "; ".join(line for line in unit["lines"] if not line.startswith("[")))


_ASKED = {
    "tool_call": "tool call",
    "reasoning": "reasoning",
    "repeat": "repeat",
    "conversation": "a growing conversation",
    "image": "pictures",
}


def _service(serve: Release, gateway: GatewayPlan) -> Iterator[str]:
    addresses = ", ".join(f"{url} ({who})" for url, who in base_urls(gateway))
    yield _row(
        "serves", f"{addresses} as {', '.join(serve.names)}; key in {gateway.settings.key_path}"
    )
    check = serve.check
    parts = [f"{len(check.questions)} questions", f"{len(check.copy)} copies"]
    parts += [what for name, what in _ASKED.items() if getattr(check, name)]
    if check.acceptance_floor:
        parts.append(f"draft acceptance of {check.acceptance_floor} or more")
    if check.prefix:
        parts.append("cached prefixes of a growing conversation")
    if check.portable:
        parts.append("PORTABLE MODE: every layer dequantised, says nothing of a Spark")
    yield _row("check", ", ".join(parts))
