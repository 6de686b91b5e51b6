"""Rules for the whole suite: lab tests must really run where they are counted on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

LAB_FOLDERS = ("tests/host/", "tests/faults/")
# Raise this with every lab test added; a suite that silently shrinks is no proof.
LAB_TESTS_FLOOR = 84

_ran: set[str] = set()
_skipped: set[str] = set()


def _is_lab(nodeid: str) -> bool:
    return nodeid.startswith(LAB_FOLDERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_lab(item.nodeid):
            item.add_marker(pytest.mark.host)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _is_lab(report.nodeid):
        return
    if report.skipped:
        _skipped.add(report.nodeid)
    elif report.when == "call":
        _ran.add(report.nodeid)


def _whole_suite(config: pytest.Config) -> bool:
    return os.environ.get("CI", "") not in ("", "false") and any(
        "tests/host" in str(argument) for argument in config.args
    )


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    if _whole_suite(session.config) and (_skipped or len(_ran) < LAB_TESTS_FLOOR):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not _ran and not _skipped:
        return
    terminalreporter.write_line(f"lab tests run: {len(_ran)} (floor {LAB_TESTS_FLOOR})")
    if _whole_suite(config) and _skipped:
        terminalreporter.write_line(
            "skipped lab tests count as failures here: " + ", ".join(sorted(_skipped)), red=True
        )
