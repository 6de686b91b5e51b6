"""The report of one host: selected fields, then redacted."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pyinfra.api.host import Host
from spark_contract.records import Finding
from spark_contract.release import (
    ACCEPTANCE,
    CONTEXT_LENGTH,
    COOLED,
    COUNTERS,
    HEALTH,
    HOT,
    LOG_LINES,
    MEMORY,
    POWER,
    PREFIX_REUSE,
    STALLED,
    STARVING,
)
from spark_contract.status import EngineEvidence, Evidence, ReleaseState

from spark_deploy.cli.report import CheckResult, HostReport, JobState, Serving, WatchdogEvent
from spark_deploy.cli.report_answers import with_answers
from spark_deploy.config.errors import Problem
from spark_deploy.hosts.preflight import judge
from spark_deploy.hosts.status import Evidence as EvidenceFact
from spark_deploy.hosts.status import HostStatus, Status
from spark_deploy.hosts.survey import Survey
from spark_deploy.plan.types import HostPlan

# ``_host_report`` selects fields that should hold nothing private; these patterns remove what a
# program or a vendor put into one of them anyway.
_GONE = "<redacted>"
_KEY = re.compile(
    r"(?i)\b(?:bearer|basic)\s+\S+|\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abpr]-|AKIA)"
    r"[\w-]{8,}|\beyJ[\w-]+\.[\w-]+\.[\w-]*"
)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_MAC = re.compile(r"(?<![\w:-])[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}(?![\w:-])")
_ADDRESS = re.compile(r"(?<![\w.:])(?:[0-9A-Fa-f]*:[0-9A-Fa-f:.]+|\d+(?:\.\d+){3})(?![\w:])")
_HOME = re.compile(r"(?<=/home/)[^/\s'\"]+")
_SERIAL = re.compile(r"(?i)\b(?:serial|s/n|uuid)\b\W*(?:number|no)?\W*[\w-]+")
_UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")
# A long word is a secret unless it is labelled a digest or consists of words, as class names do.
_LONG = re.compile(r"(?<!sha256:)(?<![\w/+-])[\w/+-]{20,}={0,2}(?![\w/+-])")
_WORDS = re.compile(r"[a-z]{4,}")


def redacted(text: str) -> str:
    """Return a text without keys, tokens, serial numbers, addresses and names of people."""
    for pattern in (_KEY, _UUID, _SERIAL, _MAIL, _MAC):
        text = pattern.sub(_GONE, text)
    text = _LOGIN.sub(f"{_GONE}@", text)
    text = _HOME.sub(_GONE, text)
    text = _ADDRESS.sub(_without_address, text)
    return _LONG.sub(_without_secret, text)


def _without_address(match: re.Match[str]) -> str:
    text = match[0]
    try:
        address = ipaddress.ip_address(text if "::" in text else text.rstrip(".:"))
    except ValueError:  # a time of day, a version
        return text
    return text if address.is_loopback or address.is_unspecified else _GONE


def _without_secret(match: re.Match[str]) -> str:
    word = match[0]
    digits, capitals = sum(map(str.isdigit, word)), sum(map(str.isupper, word))
    in_words = digits <= 4 and capitals <= 0.4 * len(word) and len(_WORDS.findall(word)) > 1
    return word if in_words or (word.isupper() and not digits) else _GONE


def _redact(value: Any) -> Any:
    """Return plain data with every text in it redacted, keys of mappings too."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted(str(key)): _redact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item) for item in value]
    return value


# Checks whose details are numbers; the details of others quote prompts and answers.
_NUMERIC_CHECKS = frozenset(
    {MEMORY, CONTEXT_LENGTH, LOG_LINES, PREFIX_REUSE, ACCEPTANCE, COUNTERS, HEALTH}
)
# Events with fixed texts; the texts of others may name addresses or quote programs.
_FIXED_EVENTS = frozenset({HOT, COOLED, POWER, STARVING, STALLED})
_DGX = ("DGX_NAME", "DGX_PRETTY_NAME", "DGX_SWBUILD_DATE", "DGX_SWBUILD_VERSION",
        "DGX_OTA_VERSION", "DGX_OTA_DATE")  # fmt: skip
_REGISTRY = re.compile(r"^.*/(?=[^/]*$)")  # of an image: it may be private


@dataclass(frozen=True, slots=True)
class HostData:
    """Facts that a report selects from."""

    survey: Survey
    status: HostStatus
    evidence: Evidence | None  # None: the host's tools are absent or of another version


def read_host(host: Host, survey: Survey) -> HostData:
    """Read the facts that the survey does not hold."""
    return HostData(survey, host.get_fact(Status), host.get_fact(EvidenceFact))


_HOST_REPORT = TypeAdapter(HostReport)


def host_report(
    number: int, data: HostData, plan: HostPlan, service: str, *, local: bool = False
) -> HostReport:
    """Return the redacted report of one host, with its answers to the open questions."""
    report = with_answers(_host_report(number, data, plan, service, local=local))
    return _HOST_REPORT.validate_python(_redact(_HOST_REPORT.dump_python(report, mode="json")))


def _host_report(
    number: int, data: HostData, plan: HostPlan, service: str, *, local: bool
) -> HostReport:
    survey, evidence = data.survey, data.evidence
    state = data.status.service(service)
    release = data.status.release(state.active if state else None)
    engines = evidence.engines if evidence else ()
    engine = next((e for e in engines if release and e.release == release.name), None)
    verdict = judge(plan.needs, survey)
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
        jobs=tuple(_jobs(data.status)),
        notes=tuple(_notes(data, service)),
        serving=_serving(release, engine, plan, data.status, service) if release else None,
        answers=(),
    )


def _machine(survey: Survey, evidence: Evidence | None) -> dict[str, str]:
    identity = survey.identity
    dgx = {
        name.lower(): identity.dgx_release[name] for name in _DGX if name in identity.dgx_release
    }
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
        **(data.status.told.versions if data.status.told else {}),
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


def _jobs(status: HostStatus) -> Iterator[JobState]:
    for job in status.told.jobs if status.told else ():
        memory = job.memory
        yield JobState(
            kind=job.kind or "unknown",
            state=job.state,
            elapsed_s=job.elapsed_s,
            free_lost_bytes=(
                memory.free_before_bytes - memory.free_after_bytes if memory else None
            ),
            cached_grown_bytes=(
                memory.cached_after_bytes - memory.cached_before_bytes if memory else None
            ),
        )


def _notes(data: HostData, service: str) -> Iterator[str]:
    status = data.status.told
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
    proof = release.proof
    engine = engine or EngineEvidence(release.name)
    same = (release.model, release.profile) == (plan.model, plan.profile)
    events = status.told.events.get(service, ()) if status.told else ()
    start = proof.start_memory if proof else None
    full = proof.last_full if proof else None
    bench = (proof.bench if proof else None) or {}
    medians = {k: v.get("median") for k, v in bench.items() if isinstance(v, dict)}
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
        kernels=engine.lines,
        start_times_s=dict(engine.times_s),
        sizes_bytes=dict(engine.sizes_bytes),
        kv_cache_tokens=engine.kv_cache_tokens,
        planned_kv_cache_tokens=(
            plan.memory.counted_tokens(plan.serve.check.max_model_len) if same else None
        ),
        planned_kv_cache_bytes=plan.memory.kv_cache_bytes if same else None,
        start_lowest_bytes=start.lowest_bytes if start else None,
        start_floor_bytes=start.floor_bytes if start else None,
        drafted_tokens=engine.drafted_tokens,
        accepted_tokens=engine.accepted_tokens,
        generated_tokens=engine.generated_tokens,
        speed={name: value for name, value in medians.items() if isinstance(value, float)},
        rollout_state=engine.rollout_state,
        rollout_times_s=dict(engine.rollout_times_s),
        events=tuple(
            WatchdogEvent(event.at, event.kind, event.text if event.kind in _FIXED_EVENTS else "")
            for event in events
        ),
    )


def _check(check: Finding) -> CheckResult:
    detail = check.detail if check.name in _NUMERIC_CHECKS and check.ok else ""
    return CheckResult(check.name, check.ok, check.weight, check.seconds, detail)
