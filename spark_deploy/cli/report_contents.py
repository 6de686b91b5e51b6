"""The report of a host: selected facts and answers to the open questions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyinfra.api.host import Host
from spark_contract import release as names
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB
from spark_contract.records import Finding
from spark_contract.status import EngineEvidence, Evidence, ReleaseState

from spark_deploy.cli.report import GB10, Answer, HostReport, JobState, Serving, redact_report
from spark_deploy.config.errors import Problem
from spark_deploy.hosts.preflight import judge
from spark_deploy.hosts.status import Evidence as EvidenceFact
from spark_deploy.hosts.status import HostStatus, Status
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.memory import gib
from spark_deploy.plan.types import HostPlan

# Their details are numbers; details of other checks quote prompts and answers.
_NUMERIC_CHECKS = {names.MEMORY, names.CONTEXT_LENGTH, names.LOG_LINES, names.PREFIX_REUSE}
_NUMERIC_CHECKS |= {names.ACCEPTANCE, names.COUNTERS, names.HEALTH}
# Their texts are fixed; texts of other events may contain addresses or quote programs.
_FIXED_EVENTS = frozenset({names.HOT, names.COOLED, names.POWER, names.STARVING, names.STALLED})
_DGX = ("DGX_NAME", "DGX_PRETTY_NAME", "DGX_SWBUILD_DATE", "DGX_SWBUILD_VERSION",
        "DGX_OTA_VERSION", "DGX_OTA_DATE")  # fmt: skip
_REGISTRY = re.compile(r"^.*/(?=[^/]*$)")  # of an image: it may be private


@dataclass(frozen=True, slots=True)
class HostData:
    survey: Survey
    status: HostStatus
    evidence: Evidence | None  # None: the host's tools are absent or of another version


def read_host(host: Host, survey: Survey) -> HostData:
    return HostData(survey, host.get_fact(Status), host.get_fact(EvidenceFact))


def host_report(
    number: int, data: HostData, plan: HostPlan, service: str, *, local: bool = False
) -> HostReport:
    return redact_report(with_answers(_host_report(number, data, plan, service, local=local)))


def _host_report(
    number: int, data: HostData, plan: HostPlan, service: str, *, local: bool
) -> HostReport:
    survey, evidence = data.survey, data.evidence
    state = data.status.service(service)
    release = data.status.release(state.active if state else None)
    engines = evidence.engines if evidence else ()
    engine = next((e for e in engines if release and e.release == release.name), None)
    verdict = judge(plan.needs, survey)
    jobs = data.status.report.jobs if data.status.report else ()
    return HostReport(
        name=f"host-{number}",
        local=local,
        machine=_machine(survey, evidence),
        versions=_versions(data, release, engine),
        stand_ins=survey.stubbed,
        memory_total_bytes=survey.memory.total_bytes,
        memory_available_bytes=survey.memory.available_bytes,
        gpu=dict(evidence.gpu) if evidence else {},
        gpu_container=evidence.gpu_container if evidence else (),
        kernel_log=dict(evidence.kernel_log) if evidence else {},
        unmanaged_containers=sum(not container.managed for container in survey.containers),
        refusals=tuple(_subject(problem) for problem in verdict.problems),
        warnings=tuple(_subject(problem) for problem in verdict.warnings),
        jobs=tuple(
            JobState(job.kind or "unknown", job.state, job.elapsed_s, job.memory) for job in jobs
        ),
        notes=tuple(_notes(data, service)),
        serving=_serving(release, engine, plan, data.status, service) if release else None,
        answers=(),
    )


def _machine(survey: Survey, evidence: Evidence | None) -> dict[str, str]:
    identity = survey.identity
    dgx = {name.lower(): value for name, value in identity.dgx_release.items() if name in _DGX}
    torn = {} if survey.gpu.torn_score is None else {"torn_score": f"{survey.gpu.torn_score:g}"}
    return {
        "architecture": identity.arch,
        "system": f"{identity.os_id} {identity.os_version}",
        **dgx,
        **torn,
        **(evidence.firmware if evidence else {}),
    }


def _versions(
    data: HostData, release: ReleaseState | None, engine: EngineEvidence | None
) -> dict[str, str]:
    gpu, proof = data.survey.gpu, release.proof if release else None
    proven = dict(proof.versions) if proof else {}
    versions = {
        "gpu": ", ".join(device.name for device in gpu.gpus),
        "driver": gpu.driver_version,
        "module": gpu.module_version,
        **(data.status.report.versions if data.status.report else {}),
        "kernel": data.survey.identity.kernel,
        "image": _REGISTRY.sub("", proven.get("image", "")),
        "plugin": proven.get("plugin", ""),
        "engine": proof.engine.get("version", "") if proof else "",
        **(engine.libraries if engine else {}),
    }
    return {name: version for name, version in versions.items() if version}


def _subject(problem: Problem) -> str:
    """Return the subject of a problem, without the name of a container or a process."""
    word, _, rest = problem.where.partition(" ")
    private = word in ("container", "process", "port") or rest.startswith("/")
    return word if private or "/" in problem.where else problem.where


def _notes(data: HostData, service: str) -> Iterator[str]:
    status = data.status.report
    if not data.status.installed:
        yield "the host tools are not installed"
    elif data.evidence is None:
        yield "the host tools are of another version: run `spark-deploy up`, then this again"
    services = status.services if status else {}
    others = [name for name, state in services.items() if name != service and state.active]
    if others:
        yield f"{len(others)} more services run; this report leaves them out"
    if data.survey.user:
        yield "read without root: sudo requires a password"
    if status and status.versions_unknown:
        yield f"no version of {', '.join(status.versions_unknown)}: timed out"


def _serving(
    release: ReleaseState,
    engine: EngineEvidence | None,
    plan: HostPlan,
    status: HostStatus,
    service: str,
) -> Serving:
    proof, memory = release.proof, plan.memory
    same = (release.model, release.profile) == (plan.model, plan.profile)
    events = status.report.events.get(service, ()) if status.report else ()
    full = proof.last_full if proof else None
    bench = (proof.bench if proof else None) or {}
    medians = {k: v.get("median") for k, v in bench.items() if isinstance(v, dict)}
    tokens = memory.counted_tokens(plan.serve.check.max_model_len)
    return Serving(
        model=release.model,
        profile=release.profile,
        release=release.name,
        proven=release.unproven is None,
        level=proof.level if proof else "",
        checked_at=proof.checked_at if proof else "",
        restarted_since_full_check=bool(
            proof and full and full.invocation_id != proof.invocation_id
        ),
        portable=bool(proof and proof.portable),
        restarts=release.restarts,
        checks=tuple(map(_check, proof.checks)) if proof else (),
        engine=engine or EngineEvidence(release.name),
        planned_kv_cache_tokens=tokens if same else None,
        planned_kv_cache_bytes=memory.kv_cache_bytes if same else None,
        start_memory=proof.start_memory if proof else None,
        speed={name: value for name, value in medians.items() if isinstance(value, float)},
        events=tuple(
            event if event.kind in _FIXED_EVENTS else replace(event, text="") for event in events
        ),
    )


def _check(check: Finding) -> Finding:
    is_numeric = check.name in _NUMERIC_CHECKS and check.ok
    return check if is_numeric else replace(check, detail="")


_WITHOUT_SERVING = ("fetched", "built", "gpu-container", "driver-trouble")
_AS_PLANNED = 0.99  # of the tokens: the plan rounds
_ENOUGH_TOKENS = 100_000  # generated before the absence of events is an answer
# True: yes, False: no, None: open; and the evidence.
Verdict = tuple[bool | None, str]
Rule = Callable[[HostReport, Any], Verdict]


def with_answers(host: HostReport) -> HostReport:
    return replace(host, answers=tuple(_answer(name, host) for name in ANSWERS))


def _answer(name: str, host: HostReport) -> Answer:
    verdict, text = None, "nothing runs"
    if host.serving or name in _WITHOUT_SERVING:
        verdict, text = ANSWERS[name](host, host.serving)
    gpu = host.versions.get("gpu", "")
    if host.stand_ins or gpu not in ("", GB10):
        reason = "stand-ins" if host.stand_ins else f"not a Spark: {gpu}"
        return Answer(name, "open", f"{reason}; {text}")
    return Answer(name, "open" if verdict is None else "yes" if verdict else "no", text)


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


def _jobs_done(kind: str, host: HostReport, _serving: object) -> Verdict:
    jobs = [job for job in host.jobs if job.kind == kind]
    if not jobs:
        return None, "no such job on the host"
    done = [job for job in jobs if job.state == "done"]
    seconds = sum(job.elapsed_s or 0 for job in done)
    text = f"{len(done)} of {len(jobs)} done" + (f", {seconds} s" if seconds else "")
    return len(done) == len(jobs), text


def _find_check(serving: Serving, name: str) -> Finding | None:
    return next((check for check in serving.checks if check.name == name), None)


def _loaded(_host: HostReport, serving: Serving) -> Verdict:
    check = _find_check(serving, names.LOG_LINES)
    if serving.portable or check is None:
        return None, "portable mode" if serving.portable else "log lines were not checked"
    return check.ok, "every required log line" if check.ok else "a line is missing"


def _answers(_host: HostReport, serving: Serving) -> Verdict:
    required = [check for check in serving.checks if check.weight == "must"]
    failed = [check.name for check in required if not check.ok]
    if serving.portable:
        return None, "portable mode"
    if failed:
        return False, f"failed: {', '.join(failed)}"
    if serving.level in ("", "quick"):
        return None, "the last check was quick"
    return True, f"{len(required)} checks passed"


def _gdn_prefill(_host: HostReport, serving: Serving) -> Verdict:
    line = next((line for line in serving.engine.lines if "GDN prefill kernel" in line), "")
    return (True, line) if line else (None, "no such line")


def _acceptance(_host: HostReport, serving: Serving) -> Verdict:
    check = _find_check(serving, names.ACCEPTANCE)
    if serving.engine.drafted_tokens:
        share = (serving.engine.accepted_tokens or 0) / serving.engine.drafted_tokens
        text = f"{share:.1%} of {serving.engine.drafted_tokens:,} drafted tokens since the start"
        return (check.ok if check else True), text
    return (check.ok, check.detail) if check else (None, "no drafts")


def _needle(_host: HostReport, serving: Serving) -> Verdict:
    check = _find_check(serving, names.NEEDLE)
    return (check.ok, f"took {check.seconds:.0f} s") if check else (None, "not run")


def _no_events(*kinds: str) -> Rule:
    def rule(_host: HostReport, serving: Serving) -> Verdict:
        seen = {event.kind for event in serving.events if event.kind in kinds}
        if seen:
            return False, f"recorded {', '.join(sorted(seen))}"
        tokens = serving.engine.generated_tokens or 0
        return (True if tokens >= _ENOUGH_TOKENS else None), f"{tokens:,} tokens since the start"

    return rule


def _rollout(_host: HostReport, serving: Serving) -> Verdict:
    if serving.engine.rollout_state is None:
        return None, "no rollout is recorded"
    times = ", ".join(f"{name} {s:.0f} s" for name, s in serving.engine.rollout_times_s.items())
    return serving.engine.rollout_state == "switched", f"{serving.engine.rollout_state}: {times}"


def _restarted(_host: HostReport, serving: Serving) -> Verdict:
    if serving.restarted_since_full_check:
        return serving.proven, "restarted since the full check"
    return None, "not restarted since the full check"


def _gpu_container(host: HostReport, _serving: object) -> Verdict:
    if not host.gpu_container:
        return None, "no container was tested"
    docker = host.versions.get("docker", "")
    return True, f"docker {docker}, {' '.join(host.gpu_container)}"


def _start_time(_host: HostReport, serving: Serving) -> Verdict:
    steps = [f"{name} {seconds:.0f} s" for name, seconds in serving.engine.times_s.items()]
    ready = _find_check(serving, names.READY)
    if ready and ready.ok:
        total = f"ready after {ready.seconds:.0f} s"
        return (True if steps else None), ", ".join([total, *steps])
    return (True, ", ".join(steps)) if steps else (None, "no step is timed")


def _memory_left(_host: HostReport, serving: Serving) -> Verdict:
    if serving.start_memory is None:
        return None, "not recorded"
    lowest, floor = serving.start_memory.lowest_bytes, serving.start_memory.floor_bytes
    return lowest >= floor, f"least {gib(lowest)}, floor {gib(floor)}"


def _kv_cache(_host: HostReport, serving: Serving) -> Verdict:
    counted, planned = serving.engine.kv_cache_tokens, serving.planned_kv_cache_tokens
    if counted is None or not planned:
        return None, f"counted {counted or 'nothing'}, planned {planned or 'nothing'}"
    text = f"{counted:,} tokens, planned {planned:,} ({counted / planned - 1:+.0%})"
    return counted >= planned * _AS_PLANNED, text


def _speed(_host: HostReport, serving: Serving) -> Verdict:
    text = ", ".join(f"{name} {value:.4g}" for name, value in serving.speed.items())
    return (True, text) if text else (None, "not measured")


def _driver_trouble(host: HostReport, _serving: object) -> Verdict:
    if "xid" not in host.kernel_log:
        return None, "the kernel log was not read"
    faults = host.kernel_log["xid"]
    return faults == 0, f"{faults} Xid lines since the boot"


ANSWERS: dict[str, Rule] = {
    "deployed": _deployed,
    "preflight": _preflight,
    "local": _local,
    "neighbours": _neighbours,
    "fetched": partial(_jobs_done, FETCH_JOB),
    "built": partial(_jobs_done, CHECKPOINT_JOB),
    "loaded": _loaded,
    "answers": _answers,
    "gdn-prefill": _gdn_prefill,
    "acceptance": _acceptance,
    "needle": _needle,
    "watch": _no_events(names.STALLED, names.STARVING, names.KILLED),
    "rollout": _rollout,
    "restarted": _restarted,
    "gpu-container": _gpu_container,
    "start-time": _start_time,
    "memory-left": _memory_left,
    "kv-cache": _kv_cache,
    "speed": _speed,
    "heat": _no_events(names.HOT, names.POWER),
    "driver-trouble": _driver_trouble,
}
