"""What a report answers to each open question; pure, so that anyone can come to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spark_contract import release
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB

from spark_deploy.cli.report_document import SPARK, Answered, Checked, HostReport, Serving

GIB = 1 << 30
_AS_PLANNED = 0.99  # of the tokens: the plan rounds
_MUCH_TOKENS = 100_000  # what an engine has to have generated before quiet says something
Found = tuple[bool | None, str]


def answered(host: HostReport) -> HostReport:
    """Return the report with its answers."""
    return replace(host, answers=tuple(_answer(name, host) for name in ANSWERS))


def _answer(name: str, host: HostReport) -> Answered:
    found, text = ANSWERS[name](host)
    if why := _no_spark(host):
        return Answered(name, "open", f"{why}; {text}")
    return Answered(name, "open" if found is None else "yes" if found else "no", text)


def _no_spark(host: HostReport) -> str:
    """Say why nothing here answers for Sparks; empty for one, and where no GPU is seen."""
    gpu = host.versions.get("gpu", "")
    if host.stand_ins:
        return "stand-ins"
    return f"no Spark, {gpu}" if gpu not in ("", SPARK) else ""


def _served(ask: Callable[[HostReport, Serving], Found]) -> Callable[[HostReport], Found]:
    """Ask of what runs; a host that serves nothing leaves the question open."""

    def of(host: HostReport) -> Found:
        return ask(host, host.serving) if host.serving else (None, "nothing runs")

    return of


def _deployed(host: HostReport, serving: Serving) -> Found:
    return serving.proven, f"{serving.model} with {serving.profile}, {serving.level} check"


def _preflight(host: HostReport, serving: Serving) -> Found:
    refused = [one.about for one in host.preflight if one.verdict == "refused"]
    if refused:
        return (False if serving.proven else None), f"refused for {', '.join(refused)}"
    warned = ", ".join(one.about for one in host.preflight) or "nothing"
    return (True if serving.proven else None), f"warned of {warned}"


def _local(host: HostReport, serving: Serving) -> Found:
    return (serving.proven, "as `@local`") if host.local else (None, "not asked as `@local`")


def _neighbours(host: HostReport, serving: Serving) -> Found:
    if not host.foreign_containers:
        return None, "no containers of others"
    return serving.proven, f"beside {host.foreign_containers} containers of others"


def _jobs(*kinds: str) -> Callable[[HostReport], Found]:
    def of(host: HostReport) -> Found:
        mine = [one for one in host.jobs if one.kind in kinds]
        if not mine:
            return None, "no such job on the host"
        done = [one for one in mine if one.state == "done"]
        seconds = sum(one.elapsed_s or 0 for one in done)
        text = f"{len(done)} of {len(mine)} done" + (f", {seconds} s" if seconds else "")
        return len(done) == len(mine), text

    return of


def _check(serving: Serving, name: str) -> Checked | None:
    return next((one for one in serving.checks if one.name == name), None)


def _loaded(host: HostReport, serving: Serving) -> Found:
    found = _check(serving, release.LOG_LINES)
    if serving.portable or found is None:
        return None, "portable mode" if serving.portable else "its log lines were not looked at"
    return found.ok, "every line that the release demands" if found.ok else "a line is missing"


def _answers(host: HostReport, serving: Serving) -> Found:
    must = [one for one in serving.checks if one.weight == "must"]
    failed = [one.name for one in must if not one.ok]
    if serving.portable:
        return None, "portable mode"
    if failed:
        return False, f"failed: {', '.join(failed)}"
    if serving.level in ("", "quick"):
        return None, "the last check was a quick one"
    return True, f"{len(must)} checks passed"


def _gdn_prefill(host: HostReport, serving: Serving) -> Found:
    line = next((one for one in serving.kernels if "GDN prefill kernel" in one), "")
    return (True, line) if line else (None, "no such line")


def _acceptance(host: HostReport, serving: Serving) -> Found:
    if serving.drafted_tokens:
        share = (serving.accepted_tokens or 0) / serving.drafted_tokens
        text = f"{share:.1%} of {serving.drafted_tokens:,} drafted tokens since the start"
        found = _check(serving, release.ACCEPTANCE)
        return (found.ok if found else True), text
    found = _check(serving, release.ACCEPTANCE)
    return (found.ok, found.detail) if found else (None, "no drafts")


def _needle(host: HostReport, serving: Serving) -> Found:
    found = _check(serving, release.NEEDLE)
    return (found.ok, f"asked in {found.seconds:.0f} s") if found else (None, "not asked")


def _quiet(*kinds: str) -> Callable[[HostReport], Found]:
    def of(host: HostReport, serving: Serving) -> Found:
        told = [one.kind for one in serving.events if one.kind in kinds]
        if told:
            return False, f"told of {', '.join(sorted(set(told)))}"
        tokens = serving.generated_tokens or 0
        return (True if tokens >= _MUCH_TOKENS else None), f"{tokens:,} tokens since the start"

    return _served(of)


def _rollout(host: HostReport, serving: Serving) -> Found:
    if serving.rollout_state is None:
        return None, "no rollout is recorded"
    times = ", ".join(f"{name} {s:.0f} s" for name, s in serving.rollout_times_s.items())
    return serving.rollout_state == "switched", f"{serving.rollout_state}: {times}"


def _restarted(host: HostReport, serving: Serving) -> Found:
    if not serving.started_since:
        return None, "it runs since its full check"
    return serving.proven, "started again since its full check"


def _gpu_container(host: HostReport) -> Found:
    docker = host.versions.get("docker", "")
    if not host.gpu_container:
        return None, "no container was proven"
    return True, f"docker {docker}, {' '.join(host.gpu_container)}"


def _start_time(host: HostReport, serving: Serving) -> Found:
    parts = [f"{name} {seconds:.0f} s" for name, seconds in serving.start_times_s.items()]
    ready = _check(serving, release.READY)
    if not parts and (ready is None or not ready.ok):
        return None, "no step is timed"
    waited = [f"waited {ready.seconds:.0f} s until it answered"] if ready and ready.ok else []
    return (True if parts else None), ", ".join([*waited, *parts])


def _memory_left(host: HostReport, serving: Serving) -> Found:
    lowest, floor = serving.start_lowest_bytes, serving.start_floor_bytes
    if lowest is None or floor is None:
        return None, "not recorded"
    return lowest >= floor, f"least {lowest / GIB:.1f} GiB, floor {floor / GIB:.1f} GiB"


def _kv_cache(host: HostReport, serving: Serving) -> Found:
    counted, planned = serving.kv_cache_tokens, serving.planned_kv_cache_tokens
    if counted is None or not planned:
        return None, f"counted {counted or 'nothing'}, planned {planned or 'nothing'}"
    apart = counted / planned - 1
    return (
        counted >= planned * _AS_PLANNED,
        f"{counted:,} tokens, planned {planned:,} ({apart:+.0%})",
    )


def _speed(host: HostReport, serving: Serving) -> Found:
    told = ", ".join(f"{name} {value:.4g}" for name, value in serving.speed.items())
    return (True, told) if told else (None, "not measured")


def _driver_trouble(host: HostReport) -> Found:
    if "xid" not in host.kernel_log:
        return None, "the kernel's log was not read"
    faults = host.kernel_log["xid"]
    return faults == 0, f"{faults} Xid lines since the boot"


ANSWERS: dict[str, Callable[[HostReport], Found]] = {
    "deployed": _served(_deployed),
    "preflight": _served(_preflight),
    "local": _served(_local),
    "neighbours": _served(_neighbours),
    "fetched": _jobs(FETCH_JOB),
    "built": _jobs(CHECKPOINT_JOB),
    "loaded": _served(_loaded),
    "answers": _served(_answers),
    "gdn-prefill": _served(_gdn_prefill),
    "acceptance": _served(_acceptance),
    "needle": _served(_needle),
    "watch": _quiet(release.STALLED, release.STARVING, release.KILLED),
    "rollout": _served(_rollout),
    "restarted": _served(_restarted),
    "gpu-container": _gpu_container,
    "start-time": _served(_start_time),
    "memory-left": _served(_memory_left),
    "kv-cache": _served(_kv_cache),
    "speed": _served(_speed),
    "heat": _quiet(release.HOT, release.POWER),
    "driver-trouble": _driver_trouble,
}
