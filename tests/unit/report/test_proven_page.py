"""The column of DGX Sparks in what-is-proven.md is generated from reports/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import report_of, said_of

from spark_deploy.cli.report import HostReport, Report, file_text
from spark_deploy.config.catalog.load import read_questions
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SparkError
from tools.docs.evidence import proven_rows, question_rows

Page = Callable[..., str]


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """Return the tables of a checkout with these reports."""
    for name in ("catalog", "schema"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/README.md").write_text("no report")

    def made(*hosts: HostReport) -> str:
        for number, host in enumerate(hosts):
            report = Report(1, "2026-11-22T12:00:00Z", "1.0", (host,))
            path = tmp_path / f"reports/{number}.json"
            path.write_text(file_text(report))
        return "\n".join([*proven_rows(tmp_path), *question_rows(tmp_path)])

    return made


def row(text: str, begin: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(begin))


def test_without_a_report_nothing_is_proven_on_a_spark(page: Page) -> None:
    text = page()
    assert "questions answered |" not in text
    assert text.count("| not yet |") == len(read_questions().parts)
    assert text.count("| none yet |") == len(read_questions().all)


def test_the_report_of_a_spark_fills_the_column_and_is_linked(page: Page) -> None:
    text = page(report_of())
    assert row(text, "| speed, memory").endswith("| 6 of 6 questions answered |")
    assert row(text, "| `@local`").endswith("| not yet |")
    captured = row(text, "| Does memory suffice")
    assert "| yes: least 17.0 GiB, floor 4.0 GiB ([2026-11-22](../../reports/0.json)) |" in captured


def test_a_lab_host_is_ignored(page: Page) -> None:
    stubbed = report_of(said_of(stubs=["ii  labstub-driver 580.159.03+labstub"]))
    assert page(stubbed) == page()


def test_answers_of_several_hosts_share_a_row(page: Page) -> None:
    text = page(report_of(), report_of())
    assert row(text, "| How fast is it?").count("yes: one_stream") == 2


def test_an_edited_file_is_refused(page: Page, tmp_path: Path) -> None:
    page(report_of())
    path = tmp_path / "reports/0.json"
    path.write_text(path.read_text().replace('"state": "yes"', '"state": "surely"'))
    with pytest.raises(SparkError, match=r"0\.json"):
        page()
