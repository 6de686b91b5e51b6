"""Make the report of one host from what it said; what is not chosen here is not told."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spark_contract.records import Event, Finding, Proof
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

from spark_deploy.cli.report_document import Checked, HostReport, Judged, Serving, Told, Work
from spark_deploy.cli.report_questions import answered
from spark_deploy.config.documents.declare import convert, typed
from spark_deploy.config.errors import Problem
from spark_deploy.hosts.facts.releases import HostStatus
from spark_deploy.hosts.facts.survey import Survey
from spark_deploy.hosts.preflight import judge
from spark_deploy.plan.types import HostPlan

# The report's fields are chosen so that nothing of the kind should come this far; this is the
# second lock, for words that a program or a vendor put where nobody expects them.


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
# A secret says nothing of itself; digests say what they are, names of classes are made of words.
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


def _without_address(found: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(found[0].rstrip(".:") if "::" not in found[0] else found[0])
    except ValueError:  # a time of day, a version
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else _GONE


def _without_secret(found: re.Match[str]) -> str:
    word = found[0]
    digits, capitals = sum(map(str.isdigit, word)), sum(map(str.isupper, word))
    in_words = digits <= 4 and capitals <= 0.4 * len(word) and len(_WORDS.findall(word)) > 1
    return word if in_words or (word.isupper() and not digits) else _GONE


def all_redacted(value: Any) -> Any:
    """Return plain data with every text in it redacted, keys of mappings as well."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted(str(key)): all_redacted(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [all_redacted(one) for one in value]
    return value


# Checks whose findings are numbers of ours; those of the others quote what was said.
_IN_NUMBERS = frozenset(
    {MEMORY, CONTEXT_LENGTH, LOG_LINES, PREFIX_REUSE,
     ACCEPTANCE, COUNTERS, HEALTH}
)  # fmt: skip
# Events that are sentences of ours; those of the others may name addresses or quote programs.
_IN_OUR_WORDS = frozenset({HOT, COOLED, POWER, STARVING, STALLED})
_DGX = ("DGX_NAME", "DGX_PRETTY_NAME", "DGX_SWBUILD_DATE", "DGX_SWBUILD_VERSION",
        "DGX_OTA_VERSION", "DGX_OTA_DATE")  # fmt: skip
_REPOSITORY = re.compile(r"^.*/(?=[^/]*$)")  # of an image: its registry may be an owner's


@dataclass(frozen=True, slots=True)
class Said:
    """Everything one host said."""

    survey: Survey
    status: HostStatus
    evidence: Evidence | None  # None: its tools are absent, or older than this


def host_report(
    number: int, said: Said, plan: HostPlan, service: str, *, local: bool = False
) -> HostReport:
    """Return the report of one host, with its answers, redacted."""
    survey, shown = said.survey, said.evidence
    state = said.status.service(service)
    release = said.status.release(state.active if state else None)
    engine = _engine(release, shown) if release else None
    found = HostReport(
        name=f"host-{number}",
        local=local,
        machine=_machine(survey, shown),
        versions=_versions(said, release, engine),
        stand_ins=survey.stubbed,
        memory_total_bytes=survey.memory.total_bytes,
        memory_available_bytes=survey.memory.available_bytes,
        gpu=dict(shown.gpu) if shown else {},
        gpu_container=shown.gpu_container if shown else (),
        kernel_log=dict(shown.kernel_log) if shown else {},
        foreign_containers=sum(not one.ours for one in survey.containers),
        preflight=tuple(_judged(plan, survey)),
        jobs=tuple(_jobs(said.status)),
        notes=tuple(_notes(said, service)),
        serving=_serving(release, engine, plan, said.status, service) if release else None,
        answers=(),
    )
    return convert(HostReport, all_redacted(typed(answered(found))))


def _machine(survey: Survey, shown: Evidence | None) -> dict[str, str]:
    who = survey.identity
    release = {name.lower(): who.dgx_release[name] for name in _DGX if name in who.dgx_release}
    torn = {} if survey.gpu.torn_score is None else {"torn_score": f"{survey.gpu.torn_score:g}"}
    return {
        "architecture": who.arch,
        "system": f"{who.os_id} {who.os_version}",
        **release,
        **torn,
        **(shown.firmware if shown else {}),
    }


def _versions(
    said: Said, release: ReleaseState | None, engine: EngineEvidence | None
) -> dict[str, str]:
    gpu, proof = said.survey.gpu, release.proof if release else None
    told = dict(said.status.told.versions) if said.status.told else {}
    parts = dict(proof.versions) if proof else {}
    found = {
        "gpu": ", ".join(one.name for one in gpu.gpus),
        "driver": gpu.driver_version,
        "module": gpu.module_version,
        **{**told, "kernel": said.survey.identity.kernel},
        "image": _REPOSITORY.sub("", parts.get("image", "")),
        "plugin": parts.get("plugin", ""),
        "engine": proof.engine.get("version", "") if proof else "",
        **(engine.libraries if engine else {}),
    }
    return {name: version for name, version in found.items() if version}


def _judged(plan: HostPlan, survey: Survey) -> Iterable[Judged]:
    verdict = judge(plan.needs, survey)
    yield from (Judged("refused", _subject(one)) for one in verdict.problems)
    yield from (Judged("warned", _subject(one)) for one in verdict.warnings)


def _subject(problem: Problem) -> str:
    """Return what a problem is about, without the name of a container or a process."""
    word, _, rest = problem.where.partition(" ")
    return (
        word
        if word in ("container", "process", "port") or rest.startswith("/")
        else (problem.where if "/" not in problem.where else word)
    )


def _jobs(status: HostStatus) -> Iterable[Work]:
    for job in status.told.jobs if status.told else ():
        seen = job.memory
        yield Work(
            kind=job.kind or "unknown",
            state=job.state,
            elapsed_s=job.elapsed_s,
            free_lost_bytes=seen.free_before_bytes - seen.free_after_bytes if seen else None,
            cached_grown_bytes=seen.cached_after_bytes - seen.cached_before_bytes if seen else None,
        )


def _engine(release: ReleaseState, shown: Evidence | None) -> EngineEvidence | None:
    """Return what the engine of a release shows; a host may run one for each of its services."""
    return next(
        (one for one in (shown.engines if shown else ()) if one.release == release.name), None
    )


def _notes(said: Said, service: str) -> Iterable[str]:
    if not said.status.installed:
        yield "nothing of ours is installed yet"
    elif said.evidence is None:
        yield "its host tools are older than this report: run the deploy again, then this"
    services = said.status.told.services if said.status.told else {}
    others = [name for name, one in services.items() if name != service and one.active]
    if others:
        yield f"{len(others)} more of its services run, which are not told here"
    if said.survey.user:
        yield "it was looked at without root: sudo asks for a password"
    if said.status.told and said.status.told.versions_unknown:
        yield f"no version of {', '.join(said.status.told.versions_unknown)}: no answer in time"


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
    planned, longest = plan.memory, plan.serve.check.max_model_len
    return Serving(
        model=release.model,
        profile=release.profile,
        release=release.name,
        proven=release.unproven is None,
        level=proof.level if proof else "",
        checked_at=proof.checked_at if proof else "",
        started_since=_started_since(proof),
        portable=bool(proof and proof.portable),
        restarts=release.restarts,
        checks=tuple(_checked(one) for one in proof.checks) if proof else (),
        kernels=engine.lines,
        start_times_s=dict(engine.times_s),
        sizes_bytes=dict(engine.sizes_bytes),
        kv_cache_tokens=engine.kv_cache_tokens,
        planned_kv_cache_tokens=planned.counted_tokens(longest) if same else None,
        planned_kv_cache_bytes=planned.kv_cache_bytes if same else None,
        start_lowest_bytes=start.lowest_bytes if start else None,
        start_floor_bytes=start.floor_bytes if start else None,
        drafted_tokens=engine.drafted_tokens,
        accepted_tokens=engine.accepted_tokens,
        generated_tokens=engine.generated_tokens,
        speed=_medians(proof.bench if proof else None),
        rollout_state=engine.rollout_state,
        rollout_times_s=dict(engine.rollout_times_s),
        events=tuple(_told(one) for one in events),
    )


def _started_since(proof: Proof | None) -> bool:
    full = proof.last_full if proof else None
    return bool(proof and full and full.invocation_id != proof.invocation_id)


def _checked(found: Finding) -> Checked:
    detail = found.detail if found.name in _IN_NUMBERS and found.ok else ""
    return Checked(found.name, found.ok, found.weight, found.seconds, detail)


def _told(event: Event) -> Told:
    text = event.text if event.kind in _IN_OUR_WORDS else ""
    return Told(event.at, event.kind, text)


def _medians(bench: dict[str, Any] | None) -> dict[str, float]:
    spreads = ((name, one) for name, one in (bench or {}).items() if isinstance(one, dict))
    return {name: one["median"] for name, one in spreads if isinstance(one.get("median"), float)}
