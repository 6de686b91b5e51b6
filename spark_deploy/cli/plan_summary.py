"""How much of a plan's files lies on a host already, whoever put it there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spark_contract.tool import COMPILING

from spark_deploy.config.catalog.profile import Profile
from spark_deploy.hosts.disk import Stored
from spark_deploy.lock.resolve import size
from spark_deploy.plan.disk import disk_total
from spark_deploy.plan.gateway import base_urls
from spark_deploy.plan.machine import NeedsPlan
from spark_deploy.plan.memory import gib
from spark_deploy.plan.types import HostPlan

RATES_MB_PER_S = (25, 100)  # of a line of 200 Mbit/s, and of one of a gigabit


def brief(plan: HostPlan, profile: Profile) -> Iterator[str]:
    """Yield the answers first; a plan that does not fit is refused before it is one."""
    known = "" if not plan.memory.unknown else " as far as is known"
    yield f"{plan.host}: {plan.model} with {plan.profile} fits{known}"
    yield row("serves", f"{', '.join(plan.serve.names)} {served(plan)}")
    yield row("fetches", _fetches(plan))
    peak_bytes, after_bytes = disk_total(plan.disk)
    yield row("disk", f"{size(after_bytes)} in all, at most {size(peak_bytes)} on the way")
    yield row("memory", _memory(plan, profile))
    for what in plan.memory.unknown:
        yield row("NOT KNOWN", what)
    asked, taken = profile.limits.memory_fraction, plan.memory.memory_fraction
    if taken < asked and not profile.kv_cache.size_bytes:
        yield row(
            "", f"its share of {asked:g} is lowered to {taken:g}: the rest is kept for others"
        )
    if not plan.serve.check.portable:
        again = "and again after a change of the engine's base image or the driver"
        yield row("first start", f"{COMPILING}, {again}")
    for one in plan.services:
        urls = ", ".join(url for url, _ in base_urls(one.gateway))
        takes = gib(one.memory.memory_fraction * one.memory.total_bytes)
        text = f"{one.serve.service}: {one.model} with {one.profile} at {urls}, takes {takes}"
        yield row("beside it", text)
    for warning in (text for one in plan.served for text in one.warnings):
        yield row("WARNING", warning)


def served(plan: HostPlan) -> str:
    """Return where clients find what a host serves first, and who computes with it."""
    where = ", ".join(f"{url} ({who})" for url, who in base_urls(plan.gateway))
    members = [one.host for one in plan.serve.cluster.members] if plan.serve.cluster else []
    if not members:
        return f"at {where}"
    if plan.host == members[0]:
        return f"at {where}, together with {', '.join(members[1:])}"
    return f"together with {members[0]}, which answers clients"


def row(title: str, text: str) -> str:
    """Return a line of a plan: what it is about, and what is said of that."""
    return f"  {title:<11} {text}"


def _fetches(plan: HostPlan) -> str:
    sources = {source.dir: source.size_bytes for one in plan.served for source in one.sources}
    images = {one.image.base: one.image.size_bytes for one in plan.served}
    files, image = sum(sources.values()), sum(images.values())
    what = "an image" if len(images) == 1 else "images"
    slow, fast = (_minutes((files + image) / rate / 1e6) for rate in RATES_MB_PER_S)
    built = "; then the checkpoint is built there" if plan.checkpoint else ""
    of_files = f"{size(files)} of files" if files else "files that nobody has read yet"
    return (
        f"{of_files} and {what} of {size(image)}, what is not there yet of it: at "
        f"most {fast} at 100 MB/s, {slow} at 25 MB/s{built}"
    )


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _memory(plan: HostPlan, profile: Profile) -> str:
    memory = plan.memory
    room = "of how many tokens the engine will say"
    if memory.full_context_users is not None:
        room = (
            f"room for {memory.full_context_users:.1f} requests of "
            f"{plan.serve.check.max_model_len:,} tokens"
        )
    return (
        f"engine {gib(memory.engine_bytes)}, KV cache {gib(memory.kv_cache_bytes)} ({room}; "
        f"{profile.limits.max_sequences} at once), left for all else {gib(memory.left_bytes)}"
    )


@dataclass(frozen=True, slots=True)
class Reuse:
    """Files of known content that a deploy links or leaves where they are."""

    found_bytes: int
    whole_bytes: int
    folders: tuple[str, ...]  # where they lie, the fullest first


def reused(stored: Stored, needs: NeedsPlan) -> Reuse:
    """Compare what a host holds with what its plan would fetch."""
    wanted = {file for _, files in needs.downloads for file in files}
    there = {(sha256, size_bytes) for _, sha256, size_bytes in stored.files}
    bytes_in: dict[str, int] = {}
    for sha256, size_bytes in wanted & there:
        folder = stored.folders.get(sha256, "")
        bytes_in[folder] = bytes_in.get(folder, 0) + size_bytes
    folders = sorted(bytes_in, key=lambda folder: (-bytes_in[folder], folder))
    whole_bytes = sum(size_bytes for _, size_bytes in wanted)
    return Reuse(sum(bytes_in.values()), whole_bytes, tuple(filter(None, folders)))


def told(one: Reuse) -> str:
    """Say it in a line; nothing where nothing lies there."""
    if not one.found_bytes:
        return ""
    where = f" found in {', '.join(one.folders)}" if one.folders else ""
    found, whole = size(one.found_bytes), size(one.whole_bytes)
    if found.split()[1] == whole.split()[1]:
        found = found.split()[0]
    return f"Reusing {found} of {whole}{where}; not fetched again, nothing is moved"
