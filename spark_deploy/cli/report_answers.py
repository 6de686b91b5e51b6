"""Answers to the questions of ``catalog/open_questions.yml``, from the report of a host alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from spark_contract import release
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB

from spark_deploy.cli.report import GB10, Answer, CheckResult, HostReport, Serving

GIB = 1 << 30
_AS_PLANNED = 0.99  # of the tokens: the plan rounds
_ENOUGH_TOKENS = 100_000  # generated before the absence of events counts as an answer
# True: yes, False: no, None: open; and the evidence.
Verdict = tuple[bool | None, str]


def with_answers(host: HostReport) -> HostReport:
    """Return the report with an answer to each open question."""
    return replace(host, answers=tuple(_answer(name, host) for name in ANSWERS))


def _answer(name: str, host: HostReport) -> Answer:
    rule = ANSWERS[name]
    if isinstance(rule, _OfServing):
        verdict, text = rule.ask(host, host.serving) if host.serving else (None, "nothing runs")
    else:
        verdict, text = rule(host)
    gpu = host.versions.get("gpu", "")
    if host.stand_ins or gpu not in ("", GB10):
        why = "stand-ins" if host.stand_ins else f"not a Spark: {gpu}"
        return Answer(name, "open", f"{why}; {text}")
    return Answer(name, "open" if verdict is None else "yes" if verdict else "no", text)


@dataclass(frozen=True, slots=True)
class _OfServing:
    """A question about the running release; open on a host without one."""

    ask: Callable[[HostReport, Serving], Verdict]


def _deployed(_host: HostReport, serving: Serving) -> Verdict:
    return serving.proven, f"{serving.model} with {serving.profile}, {serving.level} check"


def _preflight(host: HostReport, serving: Serving) -> Verdict:
    if host.refusals:
        return (False if serving.proven else None), f"refused for {', '.join(host.refusals)}"
    return (True if serving.proven else None), f"warned of {', '.join(host.warnings) or 'nothing'}"


def _local(host: HostReport, serving: Serving) -> Verdict:
    return (serving.proven, "as `@local`") if host.local else (None, "not queried as `@local`")


def _neighbours(host: HostReport, serving: Serving) -> Verdict:
    if not host.unmanaged_containers:
        return None, "no unmanaged containers"
    return serving.proven, f"next to {host.unmanaged_containers} unmanaged containers"


def _jobs(kind: str, host: HostReport) -> Verdict:
    jobs = [job for job in host.jobs if job.kind == kind]
    if not jobs:
        return None, "no such job on the host"
    done = [job for job in jobs if job.state == "done"]
    seconds = sum(job.elapsed_s or 0 for job in done)
    text = f"{len(done)} of {len(jobs)} done" + (f", {seconds} s" if seconds else "")
    return len(done) == len(jobs), text


def _check(serving: Serving, name: str) -> CheckResult | None:
    return next((check for check in serving.checks if check.name == name), None)


def _loaded(_host: HostReport, serving: Serving) -> Verdict:
    check = _check(serving, release.LOG_LINES)
    if serving.portable or check is None:
        return None, "portable mode" if serving.portable else "its log lines were not checked"
    return check.ok, "every required log line" if check.ok else "a line is missing"


def _answers(_host: HostReport, serving: Serving) -> Verdict:
    required = [check for check in serving.checks if check.weight == "must"]
    failed = [check.name for check in required if not check.ok]
    if serving.portable:
        return None, "portable mode"
    if failed:
        return False, f"failed: {', '.join(failed)}"
    if serving.level in ("", "quick"):
        return None, "the last check was a quick one"
    return True, f"{len(required)} checks passed"


def _gdn_prefill(_host: HostReport, serving: Serving) -> Verdict:
    line = next((line for line in serving.kernels if "GDN prefill kernel" in line), "")
    return (True, line) if line else (None, "no such line")


def _acceptance(_host: HostReport, serving: Serving) -> Verdict:
    check = _check(serving, release.ACCEPTANCE)
    if serving.drafted_tokens:
        share = (serving.accepted_tokens or 0) / serving.drafted_tokens
        text = f"{share:.1%} of {serving.drafted_tokens:,} drafted tokens since the start"
        return (check.ok if check else True), text
    return (check.ok, check.detail) if check else (None, "no drafts")


def _needle(_host: HostReport, serving: Serving) -> Verdict:
    check = _check(serving, release.NEEDLE)
    return (check.ok, f"took {check.seconds:.0f} s") if check else (None, "not run")


def _no_events(*kinds: str) -> _OfServing:
    def ask(_host: HostReport, serving: Serving) -> Verdict:
        seen = {event.kind for event in serving.events if event.kind in kinds}
        if seen:
            return False, f"recorded {', '.join(sorted(seen))}"
        tokens = serving.generated_tokens or 0
        return (True if tokens >= _ENOUGH_TOKENS else None), f"{tokens:,} tokens since the start"

    return _OfServing(ask)


def _rollout(_host: HostReport, serving: Serving) -> Verdict:
    if serving.rollout_state is None:
        return None, "no rollout is recorded"
    times = ", ".join(f"{name} {s:.0f} s" for name, s in serving.rollout_times_s.items())
    return serving.rollout_state == "switched", f"{serving.rollout_state}: {times}"


def _restarted(_host: HostReport, serving: Serving) -> Verdict:
    if not serving.restarted_since_full_check:
        return None, "not restarted since its full check"
    return serving.proven, "restarted since its full check"


def _gpu_container(host: HostReport) -> Verdict:
    if not host.gpu_container:
        return None, "no container was tested"
    docker = host.versions.get("docker", "")
    return True, f"docker {docker}, {' '.join(host.gpu_container)}"


def _start_time(_host: HostReport, serving: Serving) -> Verdict:
    steps = [f"{name} {seconds:.0f} s" for name, seconds in serving.start_times_s.items()]
    ready = _check(serving, release.READY)
    if ready and ready.ok:
        total = f"ready after {ready.seconds:.0f} s"
        return (True if steps else None), ", ".join([total, *steps])
    return (True, ", ".join(steps)) if steps else (None, "no step is timed")


def _memory_left(_host: HostReport, serving: Serving) -> Verdict:
    lowest, floor = serving.start_lowest_bytes, serving.start_floor_bytes
    if lowest is None or floor is None:
        return None, "not recorded"
    return lowest >= floor, f"least {lowest / GIB:.1f} GiB, floor {floor / GIB:.1f} GiB"


def _kv_cache(_host: HostReport, serving: Serving) -> Verdict:
    counted, planned = serving.kv_cache_tokens, serving.planned_kv_cache_tokens
    if counted is None or not planned:
        return None, f"counted {counted or 'nothing'}, planned {planned or 'nothing'}"
    text = f"{counted:,} tokens, planned {planned:,} ({counted / planned - 1:+.0%})"
    return counted >= planned * _AS_PLANNED, text


def _speed(_host: HostReport, serving: Serving) -> Verdict:
    text = ", ".join(f"{name} {value:.4g}" for name, value in serving.speed.items())
    return (True, text) if text else (None, "not measured")


def _driver_trouble(host: HostReport) -> Verdict:
    if "xid" not in host.kernel_log:
        return None, "the kernel's log was not read"
    faults = host.kernel_log["xid"]
    return faults == 0, f"{faults} Xid lines since the boot"


ANSWERS: dict[str, _OfServing | Callable[[HostReport], Verdict]] = {
    "deployed": _OfServing(_deployed),
    "preflight": _OfServing(_preflight),
    "local": _OfServing(_local),
    "neighbours": _OfServing(_neighbours),
    "fetched": partial(_jobs, FETCH_JOB),
    "built": partial(_jobs, CHECKPOINT_JOB),
    "loaded": _OfServing(_loaded),
    "answers": _OfServing(_answers),
    "gdn-prefill": _OfServing(_gdn_prefill),
    "acceptance": _OfServing(_acceptance),
    "needle": _OfServing(_needle),
    "watch": _no_events(release.STALLED, release.STARVING, release.KILLED),
    "rollout": _OfServing(_rollout),
    "restarted": _OfServing(_restarted),
    "gpu-container": _gpu_container,
    "start-time": _OfServing(_start_time),
    "memory-left": _OfServing(_memory_left),
    "kv-cache": _OfServing(_kv_cache),
    "speed": _OfServing(_speed),
    "heat": _no_events(release.HOT, release.POWER),
    "driver-trouble": _driver_trouble,
}
