"""A host's report: selected facts, and answers to the open questions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pyinfra.api.host import Host
from spark_contract import release as names
from spark_contract.job import CHECKPOINT_JOB, FETCH_JOB
from spark_contract.status import EngineEvidence, Evidence, ReleaseState

from spark_deploy.cli.report import GB10, Answer, HostReport, JobState, Serving, redact_report
from spark_deploy.config.errors import Problem
from spark_deploy.hosts.preflight import check_survey
from spark_deploy.hosts.status import Evidence as EvidenceFact
from spark_deploy.hosts.status import HostStatus, Status
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.memory import gib
from spark_deploy.plan.types import HostPlan

# Details of these checks contain only numbers; other details quote prompts and answers.
_NUMERIC_CHECKS = {names.MEMORY, names.CONTEXT_LENGTH, names.LOG_LINES, names.PREFIX_REUSE}
_NUMERIC_CHECKS |= {names.ACCEPTANCE, names.COUNTERS, names.HEALTH}
# These events have fixed texts; other texts may contain addresses or program output.
_FIXED_EVENTS = frozenset({names.HOT, names.COOLED, names.POWER, names.STARVING, names.STALLED})
_DGX = ("DGX_NAME", "DGX_PRETTY_NAME", "DGX_SWBUILD_DATE", "DGX_SWBUILD_VERSION",
        "DGX_OTA_VERSION", "DGX_OTA_DATE")  # fmt: skip
_REGISTRY = re.compile(r"^.*/(?=[^/]*$)")  # the registry in an image name may be private


@dataclass(frozen=True, slots=True)
class HostData:
    survey: Survey
    status: HostStatus
    evidence: Evidence | None  # None if the host tools are missing or have another version


def read_host(host: Host, survey: Survey) -> HostData:
    return HostData(survey, host.get_fact(Status), host.get_fact(EvidenceFact))


def host_report(
    number: int, data: HostData, plan: HostPlan, service: str, *, local: bool = False
) -> HostReport:
    survey, evidence = data.survey, data.evidence
    state = data.status.service(service)
    release = data.status.release(state.active if state else None)
    engines = evidence.engines if evidence else ()
    engine = next((item for item in engines if release and item.release == release.name), None)
    findings = check_survey(plan.preflight, survey)
    jobs = data.status.report.jobs if data.status.report else ()
    report = HostReport(
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
        refusals=tuple(_subject(problem) for problem in findings.problems),
        warnings=tuple(_subject(problem) for problem in findings.warnings),
        jobs=tuple(
            JobState(job.kind or "unknown", job.state, job.elapsed_s, job.memory) for job in jobs
        ),
        notes=tuple(_notes(data, service)),
        serving=_serving(release, engine, plan, data.status, service) if release else None,
        answers=(),
    )
    return redact_report(with_answers(report))


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
    """Return the subject of a problem without container and process names."""
    kind, _, _ = problem.where.partition(" ")
    is_private = kind in ("container", "process", "port") or "/" in problem.where
    return kind if is_private else problem.where


def _notes(data: HostData, service: str) -> Iterator[str]:
    status = data.status.report
    if not data.status.installed:
        yield "the host tools are not installed"
    elif data.evidence is None:
        yield (
            "the host tools are a different version; run `spark-deploy up`, "
            "then create the report again"
        )
    services = status.services if status else {}
    others = [name for name, state in services.items() if name != service and state.active]
    if others:
        yield f"this report excludes {len(others)} other running services"
    if data.survey.user:
        yield "the report was made without root, because sudo requires a password"
    if status and status.versions_unknown:
        yield f"versions not read because of a timeout: {', '.join(status.versions_unknown)}"


def _serving(
    release: ReleaseState,
    engine: EngineEvidence | None,
    plan: HostPlan,
    status: HostStatus,
    service: str,
) -> Serving:
    proof, memory = release.proof, plan.memory
    is_planned = (release.model, release.profile) == (plan.model, plan.profile)
    events = status.report.events.get(service, ()) if status.report else ()
    full = proof.last_full if proof else None
    bench = (proof.bench if proof else None) or {}
    medians = {key: value.get("median") for key, value in bench.items() if isinstance(value, dict)}
    tokens = memory.counted_tokens(plan.release.check.max_model_len)
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
        checks=tuple(
            check if check.ok and check.name in _NUMERIC_CHECKS else replace(check, detail="")
            for check in (proof.checks if proof else ())
        ),
        engine=engine or EngineEvidence(release.name),
        planned_kv_cache_tokens=tokens if is_planned else None,
        planned_kv_cache_bytes=memory.kv_cache_bytes if is_planned else None,
        start_memory=proof.start_memory if proof else None,
        speed={name: value for name, value in medians.items() if isinstance(value, float)},
        events=tuple(
            event if event.kind in _FIXED_EVENTS else replace(event, text="") for event in events
        ),
    )


# The questions in catalog/open_questions.yml, in the same order.
QUESTION_IDS = (
    "deployed", "preflight", "local", "neighbours", "fetched", "built", "loaded", "answers",
    "gdn-prefill", "acceptance", "needle", "watch", "rollout", "restarted", "gpu-container",
    "start-time", "memory-left", "kv-cache", "speed", "heat", "driver-trouble",
)  # fmt: skip
_AS_PLANNED = 0.99  # required fraction of the planned tokens, because the plan rounds its numbers
_ENOUGH_TOKENS = 100_000  # generated tokens after which "no events" answers the question
_STATES: dict[bool | None, Literal["yes", "no", "open"]] = {True: "yes", False: "no", None: "open"}
Verdict = tuple[str, bool | None, str]  # question; answer, or None if open; evidence


def with_answers(host: HostReport) -> HostReport:
    """Add an answer to each open question; unless the host is a Spark, all answers are "open"."""
    verdicts = list(_host_verdicts(host))
    if host.serving:
        verdicts += _deployment_verdicts(host, host.serving)
        verdicts += _check_verdicts(host.serving)
        verdicts += _engine_verdicts(host.serving)
    by_question = {question: (is_yes, evidence) for question, is_yes, evidence in verdicts}
    caveat, gpu = "", host.versions.get("gpu", "")
    if host.stand_ins:
        caveat = "stand-ins; "
    elif gpu not in ("", GB10):
        caveat = f"not a Spark: {gpu}; "
    answers = []
    for question in QUESTION_IDS:
        is_yes, evidence = by_question.get(question, (None, "nothing is running"))
        state = "open" if caveat else _STATES[is_yes]
        answers.append(Answer(question, state, caveat + evidence))
    return replace(host, answers=tuple(answers))


def _host_verdicts(host: HostReport) -> Iterator[Verdict]:
    for name, kind in (("fetched", FETCH_JOB), ("built", CHECKPOINT_JOB)):
        jobs = [job for job in host.jobs if job.kind == kind]
        finished = [job for job in jobs if job.state == "done"]
        if not jobs:
            yield name, None, "no such job"
            continue
        text = f"{len(finished)} of {len(jobs)} done"
        if seconds := sum(job.elapsed_s or 0 for job in finished):
            text += f", {seconds} s"
        yield name, len(finished) == len(jobs), text
    if options := " ".join(host.gpu_container):
        yield "gpu-container", True, f"docker {host.versions.get('docker', '')}, {options}"
    else:
        yield "gpu-container", None, "no container was tested"
    faults = host.kernel_log.get("xid")
    if faults is None:
        yield "driver-trouble", None, "the kernel log was not read"
    else:
        yield "driver-trouble", faults == 0, f"{faults} Xid lines since boot"


def _deployment_verdicts(host: HostReport, serving: Serving) -> Iterator[Verdict]:
    proven, engine = serving.proven, serving.engine
    served = f"{serving.model} with {serving.profile}"
    yield "deployed", proven, f"{served}, {serving.level} check"
    text = f"warnings: {', '.join(host.warnings) or 'none'}"
    if host.refusals:
        text = f"rejected because of {', '.join(host.refusals)}"
    yield "preflight", (not host.refusals) if proven else None, text
    text = "queried as `@local`" if host.local else "not queried as `@local`"
    yield "local", proven if host.local else None, text
    count = host.unmanaged_containers
    text = f"{count} unmanaged containers also run" if count else "no unmanaged containers"
    yield "neighbours", proven if count else None, text
    times = ", ".join(f"{name} {s:.0f} s" for name, s in engine.rollout_times_s.items())
    state = engine.rollout_state
    text = f"{state}: {times}" if state else "no rollout is recorded"
    yield "rollout", state == "switched" if state else None, text
    restarted = serving.restarted_since_full_check
    text = "restarted since the full check" if restarted else "not restarted since the full check"
    yield "restarted", proven if restarted else None, text


def _check_verdicts(serving: Serving) -> Iterator[Verdict]:
    checks = {check.name: check for check in serving.checks}
    log_lines = None if serving.portable else checks.get(names.LOG_LINES)
    text = "portable mode" if serving.portable else "log lines were not checked"
    if log_lines:
        text = (
            "every required log line is present" if log_lines.ok else "a required line is missing"
        )
    yield "loaded", log_lines.ok if log_lines else None, text
    required = [check for check in serving.checks if check.severity == "must"]
    failed = [check.name for check in required if not check.ok]
    if serving.portable:
        yield "answers", None, "portable mode"
    elif failed:
        yield "answers", False, f"failed: {', '.join(failed)}"
    elif serving.level in ("", "quick"):
        yield "answers", None, "the last check was quick"
    else:
        yield "answers", True, f"{len(required)} checks passed"
    acceptance, engine = checks.get(names.ACCEPTANCE), serving.engine
    if engine.drafted_tokens:
        share = (engine.accepted_tokens or 0) / engine.drafted_tokens
        text = f"{share:.1%} of {engine.drafted_tokens:,} drafted tokens accepted since startup"
        yield "acceptance", acceptance.ok if acceptance else True, text
    elif acceptance:
        yield "acceptance", acceptance.ok, acceptance.detail
    else:
        yield "acceptance", None, "no drafts"
    needle = checks.get(names.NEEDLE)
    text = f"took {needle.seconds:.0f} s" if needle else "not run"
    yield "needle", needle.ok if needle else None, text


def _engine_verdicts(serving: Serving) -> Iterator[Verdict]:
    engine, memory = serving.engine, serving.start_memory
    line = next((line for line in engine.lines if "GDN prefill kernel" in line), "")
    yield "gdn-prefill", True if line else None, line or "no such line"
    tokens = engine.generated_tokens or 0
    for name, kinds in (
        ("watch", {names.STALLED, names.STARVING, names.KILLED}),
        ("heat", {names.HOT, names.POWER}),
    ):
        events = sorted({event.kind for event in serving.events} & kinds)
        if events:
            yield name, False, f"recorded {', '.join(events)}"
        else:
            text = f"{tokens:,} tokens since the start"
            yield name, True if tokens >= _ENOUGH_TOKENS else None, text
    steps = [f"{name} {seconds:.0f} s" for name, seconds in engine.times_s.items()]
    ready = [f"ready after {check.seconds:.0f} s" for check in serving.checks
             if check.name == names.READY and check.ok]  # fmt: skip
    text = ", ".join([*ready, *steps]) or "no step was timed"
    yield "start-time", True if steps else None, text
    text = "not recorded"
    if memory:
        text = f"minimum {gib(memory.lowest_bytes)}, floor {gib(memory.floor_bytes)}"
    yield "memory-left", memory.lowest_bytes >= memory.floor_bytes if memory else None, text
    counted, planned = engine.kv_cache_tokens, serving.planned_kv_cache_tokens
    if counted is None or not planned:
        text = f"tokens counted: {counted or 'none'}, planned: {planned or 'none'}"
        yield "kv-cache", None, text
    else:
        text = f"{counted:,} tokens counted, {planned:,} planned ({counted / planned - 1:+.0%})"
        yield "kv-cache", counted >= planned * _AS_PLANNED, text
    text = ", ".join(f"{name} {value:.4g}" for name, value in serving.speed.items())
    yield "speed", True if text else None, text or "not measured"
