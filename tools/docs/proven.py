"""The tables of what-is-proven.md: from the open questions, and from the reports of Sparks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lab import flavour
from spark_deploy.catalog.load import read_questions
from spark_deploy.catalog.questions import Part, Question
from spark_deploy.cli.looks.report.document import Report
from spark_deploy.cli.looks.report.markdown import read_report
from tools.docs.declared import cell

BEGIN = "<!-- generated from catalog/open_questions.yml and reports/ by `make docs` -->"
END = "<!-- the rest is written by hand -->"


def proven_page(checkout: Path) -> Iterator[str]:
    """Yield the page with its tables made anew."""
    before, _, rest = (checkout / "docs/reference/what-is-proven.md").read_text().partition(BEGIN)
    yield before + BEGIN
    yield from tables(checkout)
    yield END + rest.partition(END)[2]


def tables(checkout: Path) -> Iterator[str]:
    """Yield what is proven by part, and every open question with its answers."""
    reports = {
        path.name: read_report(path, checkout=checkout)
        for path in sorted((checkout / "reports").glob("*.md"))
        if path.name != "README.md"
    }
    parts = read_questions(checkout).parts
    yield from ("", "| part | virtual lab | H200, H100 | DGX Spark |", "|---|---|---|---|")
    for part in parts:
        lab = part.lab.replace("{flavours}", _flavours())
        row = (part.part, lab, part.gpu, _column(part, reports))
        yield f"| {' | '.join(map(cell, row))} |".replace("|  |", "| |")
    yield from _flavours_table(checkout)
    yield from ("", "## Open questions", "", OPEN, "")
    yield "| question | how a Spark answers it | answers |"
    yield "|---|---|---|"
    for part in parts:
        for one in part.questions:
            told = "<br>".join(_told(one, reports)) or "none yet"
            yield f"| {cell(one.question)} | {cell(one.how)} | {told} |"
    yield ""


OPEN = """
Only a DGX Spark can answer these. [How an owner has it answer](reports.md): one command, one file.
""".strip()


def _flavours() -> str:
    """Return what guests can look like, each in its own words and with its release."""
    found = map(flavour.read, flavour.names())
    return "; ".join(
        f"`{one.name}` ({f'Debian {one.release.version}, ' if one.release else ''}{one.summary})"
        for one in found
    )


def _flavours_table(checkout: Path) -> Iterator[str]:
    """Yield what `tests/host/test_flavours.py` saw on a host of each flavour, whole runs only."""
    path = checkout / "proofs/results/lab/flavours.json"
    if not path.exists():
        return
    found = json.loads(path.read_text("utf-8"))
    yield from ("", "## Every flavour, whole", "", FLAVOURS.format(**found), "")
    yield "| flavour | doctor | first deploy | second | the owner's | after a reboot |"
    yield "|---|---|---|---|---|---|"
    for row in found["rows"]:
        owners, again = row["owners"], row["rebooted"]
        counted = ", ".join(f"{owners[key]:,} {words}" for key, words in COUNTED.items())
        system = row["system"].partition(" (")[0]
        cells = (
            f"`{row['flavour']}`: {system}, docker {row['docker']}, {row['date']}",
            f"exit {row['doctor']['exit_code']}, {row['doctor']['warnings']} warnings",
            f"serves; {row['first']['changed']} operations changed something",
            f"{row['second']['changed']} did",
            f"{owners['changed']} different of {counted}",
            f"serves; {again['owners_changed']} different; a deploy: {again['changed']} changes",
        )
        yield f"| {' | '.join(map(cell, cells))} |"


FLAVOURS = """
[flavours.json](../../proofs/results/lab/flavours.json), from {device}; `{command}` writes it
anew. The owner's things are compared by `tests/host/belongings.py` with ordinary tools: content,
mode and owner of files (below `/etc`, `/home`, `/root`, `/srv`, `/opt`, `/usr/local`, `/data`,
crontabs, docker's volumes), units and whether they start, packages, containers with their
configuration, images, who listens, accounts, the owner's keys of `daemon.json`. New ones are not
counted.
""".strip()
COUNTED = {
    "files": "files", "enabled": "units", "packages": "packages", "containers": "containers",
    "images": "images", "sockets": "listeners",
}  # fmt: skip


def _column(part: Part, reports: dict[str, Report]) -> str:
    answered = sum(1 for one in part.questions if any(_told(one, reports)))
    return f"{answered} of {len(part.questions)} questions answered" if answered else "not yet"


def _told(question: Question, reports: dict[str, Report]) -> Iterator[str]:
    """Yield what each report of a Spark answers; what lab hosts show does not count."""
    for name, report in reports.items():
        for host in report.hosts:
            for one in host.answers:
                if host.is_spark and one.id == question.id and one.state != "open":
                    source = f"[{report.at[:10]}](../../reports/{name})"
                    yield f"{one.state}: {cell(one.text)} ({source})"
