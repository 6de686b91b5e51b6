"""Rules for the whole suite: lab tests must really run in CI."""

import os
from collections.abc import Iterator

import pytest

LAB_FOLDERS = ("tests/host/", "tests/faults/")

_chosen: set[str] = set()
_ran: set[str] = set()
_skipped: set[str] = set()


def _is_lab(nodeid: str) -> bool:
    return nodeid.startswith(LAB_FOLDERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_lab(item.nodeid):
            item.add_marker(pytest.mark.host)
            if os.geteuid() != 0:  # in CI a skipped lab test fails the run, see below
                item.add_marker(pytest.mark.skip(reason="the virtual lab needs root"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_lab(item.nodeid) and hasattr(item.config, "workerinput"):
        pytest.fail("lab tests share a lab: run them without pytest-xdist's -n", pytrace=False)


def pytest_collection_finish(session: pytest.Session) -> None:
    _chosen.update(item.nodeid for item in session.items if _is_lab(item.nodeid))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped and _is_lab(report.nodeid):
        _skipped.add(report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _is_lab(report.nodeid):
        return
    if report.skipped:
        _skipped.add(report.nodeid)
    elif report.when == "call":
        _ran.add(report.nodeid)


def _is_required(config: pytest.Config) -> bool:
    requested = any(
        folder.rstrip("/") in str(argument) for argument in config.args for folder in LAB_FOLDERS
    )
    return os.environ.get("CI", "") not in ("", "false") and (requested or bool(_chosen | _skipped))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    if _is_required(session.config) and (_skipped or not _ran or _ran != _chosen):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not _ran and not _skipped and not _is_required(config):
        return
    terminalreporter.write_line(f"lab tests run: {len(_ran)} of {len(_chosen)}")
    if _is_required(config) and _skipped:
        terminalreporter.write_line(
            "skipped lab tests count as failures here: " + ", ".join(sorted(_skipped)), red=True
        )
