"""Tables of result files, sweeps and proven parts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proofs.kernel_notes import find_note
from proofs.result_files import CHECKOUT, find_kind
from spark_deploy.cli.report import Report, read_report
from spark_deploy.config.catalog.guard_rails import Part, Question
from spark_deploy.config.catalog.load import read_questions
from tools.docs.declared import row

RESULTS = CHECKOUT / "proofs/results"
LISTED = 20
"""Files of a run that the table of runs names."""
SWEEP_GROUPS = {
    "for good": "permanent failure",
    "once": "transient failure",
    "first deploy, run after run": "first deploy, each run interrupted one point later",
    "profile switch, run after run": "profile switch, each run interrupted one point later",
    "models on request": "on-demand models",
    "work of the host": "jobs and rollouts on the host",
    "records": "state files",
    "before": "missing before the deploy",
    "during": "lost during the deploy",
}


def result_rows(folder: str) -> Iterator[str]:
    paths = sorted((RESULTS / folder).glob("*.json"))
    for target in sorted({find_kind(path.stem).target for path in paths}):
        about = ["The files contain times of:", ""] if target == "gpu-times" else []
        yield from ("", f"### `make {target}`", "", *about)
        for path in paths:
            result, kind = json.loads(path.read_text("utf-8")), find_kind(path.stem)
            if kind.target == target:
                needs = f"needs {kind.needs}" if kind.needs else ""
                facts = "; ".join(filter(None, (needs, _device(result), _outcome(result))))
                yield f"- [{path.stem}]({folder}/{path.name}): {kind.tests} ({facts})"


def run_rows(folder: str) -> Iterator[str]:
    """Yield the runs behind a folder's files: dates, tested commit, devices."""
    runs: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for path in sorted((RESULTS / folder).glob("*.json")):
        result = json.loads(path.read_text("utf-8"))
        run = (find_kind(path.stem).target, result["commit"][:12], _devices(result))
        runs.setdefault(run, {}).setdefault(result["date"], []).append(path.stem)
    yield from (row("run", "date", "commit", "device", "files"), f"|{'---|' * 5}")
    for (target, commit, device), dates in sorted(runs.items(), key=lambda run: max(run[1])):
        names = sorted(name for day in dates.values() for name in day)
        files = ", ".join(names) if len(names) <= LISTED else f"the other {len(names)} files"
        days = " and ".join(sorted(dates))
        yield row(f"`make {target}`", days, f"`{commit}`", device, files)


def _devices(result: dict[str, Any]) -> str:
    count = str(result["device"]).count("\n") + 1
    return f"{count} × {_device(result)}" if count > 1 else _device(result)


def _outcome(result: dict[str, Any]) -> str:
    verdicts = [entry["passed"] for entry in result.get("rows", []) if "passed" in entry]
    names = {True: "passed", False: "failed", None: "measured"}
    counts = ((verdicts.count(verdict), name) for verdict, name in names.items())
    return ", ".join(f"{count} {name}" for count, name in counts if count)


def device_of(name: str) -> str:
    [path] = RESULTS.glob(f"[gc]pu/{name}")
    return _device(json.loads(path.read_text("utf-8")))


def _device(result: dict[str, Any]) -> str:
    device = str(result["device"]).partition(",")[0].partition("\n")[0]
    return next((word for word in device.split() if re.match(r"[A-Z]+\d", word)), device)


def kernel_rows() -> Iterator[str]:
    table = json.loads((RESULTS / "cpu/backends.json").read_text("utf-8"))
    devices = table["devices"]
    layers: dict[tuple[str, ...], dict[str, None]] = {}
    for entry in table["differences"]:
        kernels = (entry[device].rpartition(" > ")[2] for device in devices)
        first, second = (entry[device] for device in devices)
        note = find_note(entry["choice"], (first, second))
        key = (
            *kernels,
            note if entry["planned"] else "every plan selects the same kernel on both GPUs",
        )
        layers.setdefault(key, {})[re.sub(r"linear .*", "linear layers", entry["choice"])] = None
    yield row(
        "layers",
        *(f"{device['name']} (compute capability {key})" for key, device in devices.items()),
        "handled by",
    )
    yield "|---|---|---|---|"
    for (first, second, handled), names in layers.items():
        yield row(", ".join(names), f"`{first}`", f"`{second}`", handled)


def sweep_sections() -> Iterator[str]:
    for path in sorted((RESULTS / "sweeps").glob("*.json")):
        yield from _sweep(path)


def _sweep(path: Path) -> Iterator[str]:
    sweep = json.loads(path.read_text("utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in sweep["versions"].items())
    passed, total = (
        sum(group[key] for group in sweep["tried"].values()) for key in ("held", "cases")
    )
    yield from (f"## {path.stem}", "")
    yield (
        f"**{passed} of {total} cases passed** ([{path.name}]({path.name}), "
        f"{sweep['measured_at'][:10]}, {versions}):"
    )
    yield ""
    for group, counts in sweep["tried"].items():
        yield f"- {SWEEP_GROUPS.get(group, group)}: {counts['held']} of {counts['cases']}"
    failed = [case for case in sweep["rows"] if case["wrong"]]
    yield from (f"\nFailed: {case['case']}: {case['wrong'][:200]}" for case in failed)
    yield ""


def proven_rows(checkout: Path) -> Iterator[str]:
    reports = _reports(checkout)
    for part in read_questions(checkout).parts:
        yield f"- {part.part}:"
        sparks = _on_sparks(part, reports) if reports else ""
        places = {"virtual lab": part.lab, "H200 or H100": part.gpu, "DGX Spark": sparks}
        yield from (f"  - *{place}*: {text}" for place, text in places.items() if text)


def question_rows(checkout: Path) -> Iterator[str]:
    reports = _reports(checkout)
    for part in read_questions(checkout).parts:
        for question in part.questions:
            yield f"- {question.question}"
            yield from (f"  - {answer}" for answer in _answers(question, reports))


def _reports(checkout: Path) -> dict[str, Report]:
    return {path.name: read_report(path) for path in sorted((checkout / "reports").glob("*.json"))}


def _on_sparks(part: Part, reports: dict[str, Report]) -> str:
    answered = sum(1 for question in part.questions if any(_answers(question, reports)))
    return f"{answered} of {len(part.questions)} questions answered" if answered else "not yet"


def _answers(question: Question, reports: dict[str, Report]) -> Iterator[str]:
    for name, report in reports.items():
        for host in report.hosts:
            for answer in host.answers:
                if host.is_spark and answer.id == question.id and answer.state != "open":
                    source = f"[{report.at[:10]}](../../reports/{name})"
                    yield f"{answer.state}: {answer.text} ({source})"
