"""Rules for the whole suite: lab tests must really run where they are counted on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

LAB_FOLDERS = ("tests/host/", "tests/faults/")
# Raise this with every lab test that the gate runs; a suite that silently shrinks is no proof. How
# many there are beside those, tests/unit/lab/test_lab_test_rules.py counts.
LAB_TESTS_FLOOR = 50

_collected: set[str] = set()
_ran: set[str] = set()
_skipped: set[str] = set()


def _is_lab(nodeid: str) -> bool:
    return nodeid.startswith(LAB_FOLDERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_lab(item.nodeid):
            item.add_marker(pytest.mark.host)
            if os.geteuid() != 0:  # under CI a skipped lab test fails the run, see below
                item.add_marker(pytest.mark.skip(reason="the virtual lab needs root"))
            _collected.add(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _is_lab(report.nodeid):
        return
    if report.skipped:
        _skipped.add(report.nodeid)
    elif report.when == "call":
        _ran.add(report.nodeid)


def _whole_suite(config: pytest.Config) -> bool:
    """Return whether this run is counted on: under CI, with lab tests asked for in any way."""
    asked = any(folder.rstrip("/") in str(word) for word in config.args for folder in LAB_FOLDERS)
    return os.environ.get("CI", "") not in ("", "false") and (asked or bool(_collected))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    if _whole_suite(session.config) and (_skipped or len(_ran) < LAB_TESTS_FLOOR):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not _ran and not _skipped and not _whole_suite(config):
        return
    terminalreporter.write_line(f"lab tests run: {len(_ran)} (floor {LAB_TESTS_FLOOR})")
    if _whole_suite(config) and _skipped:
        terminalreporter.write_line(
            "skipped lab tests count as failures here: " + ", ".join(sorted(_skipped)), red=True
        )
