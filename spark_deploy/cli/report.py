"""The file that ``doctor --report`` writes: the fields, and the redaction of strings."""

import ipaddress
import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from spark_contract import files
from spark_contract.job import JobMemory
from spark_contract.records import Event, Finding, StartMemory
from spark_contract.status import EngineEvidence

from spark_deploy.cli import project_version
from spark_deploy.config.errors import Problem, SparkError

GB10 = "NVIDIA GB10"
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class JobState:
    kind: str
    state: str
    elapsed_s: int | None
    memory: JobMemory | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    model: str
    profile: str
    release: str
    proven: bool
    level: str  # level of the last check; empty if never checked
    checked_at: str  # UTC
    restarted_since_full_check: bool
    portable: bool
    restarts: Count
    checks: tuple[Finding, ...]  # excludes details that quote prompts or answers
    engine: EngineEvidence
    planned_kv_cache_tokens: int | None
    planned_kv_cache_bytes: int | None
    start_memory: StartMemory | None
    speed: dict[str, float]  # medians of the benchmark stored with the proof
    events: tuple[Event, ...]  # excludes texts that may contain addresses


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    state: Literal["yes", "no", "open"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    name: Annotated[str, Field(pattern="^host-[0-9]+$")]  # never the host's own name
    local: bool
    machine: dict[str, str]
    versions: dict[str, str]
    stand_ins: tuple[str, ...]  # programs of the virtual lab that replace a Spark's
    memory_total_bytes: Count
    memory_available_bytes: Count
    gpu: dict[str, float]
    gpu_container: tuple[str, ...]  # docker options with which a container could use the GPU
    kernel_log: dict[str, int]  # number of lines since boot, by kind
    unmanaged_containers: Count
    refusals: tuple[str, ...]  # subjects of the problems that preflight found
    warnings: tuple[str, ...]
    jobs: tuple[JobState, ...]
    notes: tuple[str, ...]
    serving: Serving | None
    answers: tuple[Answer, ...]

    @property
    def is_spark(self) -> bool:
        """Return whether the figures are valid for DGX Sparks."""
        return self.versions.get("gpu") == GB10 and not self.stand_ins


@dataclass(frozen=True, slots=True)
class Report:
    __pydantic_config__ = ConfigDict(extra="forbid")

    schema_version: Literal[1]
    at: str
    version: str
    hosts: Annotated[tuple[HostReport, ...], Field(min_length=1)]


_REPORT = TypeAdapter(Report)
_HOST_REPORT = TypeAdapter(HostReport)


def read_report(path: Path) -> Report:
    fix = "use an unchanged file from `spark-deploy doctor --report`"
    try:
        return _REPORT.validate_json(path.read_bytes())
    except ValidationError as error:
        raise SparkError([
            Problem(f"{path.name}: {'.'.join(map(str, problem['loc']))}", problem["msg"], fix)
            for problem in error.errors(include_url=False, include_input=False)
        ]) from error  # fmt: skip


def report_data(report: Report) -> dict[str, Any]:
    return dict(_REPORT.dump_python(report, mode="json"))


def render_report(report: Report) -> str:
    return json.dumps(report_data(report), indent=1, ensure_ascii=False) + "\n"


def write_report(hosts: tuple[HostReport, ...], path: Path | None) -> tuple[Report, Path]:
    at = datetime.now(timezone.utc)
    report = Report(1, at.strftime("%Y-%m-%dT%H:%M:%SZ"), project_version(), hosts)
    path = path or Path(f"spark-report-{at:%Y%m%d-%H%M%S}.json")
    files.write_text(path, render_report(report))
    return report, path


# The report's fields should contain no private data. These patterns remove private data that a
# program or vendor has put into a field.
_REDACTED = "<redacted>"
_KEY = re.compile(
    r"(?i)\b(?:bearer|basic)\s+\S+|\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abpr]-|AKIA)"
    r"[\w-]{8,}|\beyJ[\w-]+\.[\w-]+\.[\w-]*"
)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_MAC = re.compile(
    r"(?<!\w)[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5,}(?!\w)"
    r"|(?<![\w.])[0-9A-Fa-f]{4}(?:\.[0-9A-Fa-f]{4}){2}(?!\w)"
)
_IPV6 = re.compile(r"(?<![0-9A-Fa-f.:])[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?![\w:])")
_IPV4 = re.compile(r"(?<![\w.])\d+(?:\.\d+){3}(?!\w)")
_NEXT_TO_ADDRESS = re.compile(r"^:(?!:)|\.+$|(?:(?<=::)|(?<!:)):$")
_HOME = re.compile(r"(?<=/home/)[^/\s'\"]+")
_SERIAL = re.compile(r"(?i)\b(?:serial|s/n|uuid)\b\W*(?:number|no)?\W*[\w-]+")
_UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")
# A long word is a secret unless it is labeled a digest or consists of words, as class names do.
_LONG = re.compile(r"(?<!sha256:)(?<![\w/+-])[\w/+-]{20,}={0,2}(?![\w/+-])")
_WORDS = re.compile(r"[a-z]{4,}")


def redact_text(text: str) -> str:
    text = _LOGIN.sub(f"{_REDACTED}@", text)
    for pattern in (_KEY, _UUID, _SERIAL, _MAIL, _MAC):
        text = pattern.sub(_REDACTED, text)
    text = _HOME.sub(_REDACTED, text)
    text = _IPV4.sub(_redact_address, _IPV6.sub(_redact_address, text))
    return _LONG.sub(_redact_secret, text)


def _redact_address(match: re.Match[str]) -> str:
    text = match[0]
    first_word, colon, rest = text.partition(":")
    # The match may include the end of a label, as in "mac:ADDRESS".
    for label, candidate in (("", text), (first_word + colon, rest)):
        try:
            address = ipaddress.ip_address(_NEXT_TO_ADDRESS.sub("", candidate))
        except ValueError:  # for example, a time of day or a version
            continue
        return text if address.is_loopback or address.is_unspecified else label + _REDACTED
    return text


def _redact_secret(match: re.Match[str]) -> str:
    word = match[0]
    digits, capitals = sum(map(str.isdigit, word)), sum(map(str.isupper, word))
    is_text = digits <= 4 and capitals <= 0.4 * len(word) and len(_WORDS.findall(word)) > 1
    return word if is_text or (word.isupper() and not digits) else _REDACTED


def redact_value(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {redact_text(str(key)): redact_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_value(item) for item in value]
    return value


def redact_report(report: HostReport) -> HostReport:
    return _HOST_REPORT.validate_python(redact_value(_HOST_REPORT.dump_python(report, mode="json")))
