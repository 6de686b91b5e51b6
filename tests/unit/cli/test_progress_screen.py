import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from spark_deploy.cli import progress_screen
from spark_deploy.cli.progress_screen import HostView, Transcript, watch
from spark_deploy.hosts.releases import CHECK_WARNING
from tools.docs.screens import feed

LOG = """\
--> Connecting to hosts...
    [a]  Connected
    [b]  Connected
--> Starting operation: Base | Install packages
    [a]  No changes
    [b]  Success

--> Starting operation: Serve | Wait for all jobs
    [a]  fetch org/a-long-name-of-it: running: download, 31.2 of 72.4 GB, 412 MB/s, 2 min left
    [a]  Success
    [b]  No changes

--> Starting operation: Serve | Serve the release on a
    [a]  rollout of main-aaaaaaaaaaaa: start: waited_s=95 loading weights, 31.2 of 72.4 GB, 48 s
    [a]  Success
    [b]  Skipped

--> Starting operation: Serve | Serve the release on b
    [a]  Skipped
    [b]  main-bbbbbbbbbbbb: serves main-aaaaaaaaaaaa
    [b]  rollout of main-bbbbbbbbbbbb: check: FAIL answers
    [b]  b still serves x with agent; the new release was rejected: it answers garbage
    [b]    main-bbbbbbbbbbbb: rolled-back in phase check: it answers garbage
    [b]    engine log: /cache/b-engine.log
    [b]  Error: executed 0 commands

--> Starting operation: Verify | Verify the service
    [a]  serves x with profile v2 as x at http://127.0.0.1:8000/v1
    [a]  proof: full check of 2026-11-22T08:01:58Z, 16 checks; one live answer in 0.1 s
    [a]  Success
"""
DOWNLOADING, LOADING = "2 min left", "72.4 GB, 48 s"


def read(text):
    transcript = Transcript({name: HostView(name) for name in ("a", "b")})
    printed: list[str] = []
    for number, line in enumerate(text.splitlines()):
        printed += feed(transcript, line, float(number))
    return transcript, printed


def until(part):
    return read(LOG[: LOG.index(part) + len(part)])[0]


def rows(transcript, width=100):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(progress_screen.rows(transcript, 75, width))
    return console.export_text().splitlines()


def summary(transcript, code):
    return "\n".join(text.plain for text in progress_screen.summary(transcript, code, 30))


@pytest.mark.parametrize("width", [80, 100, 160])
def test_each_host_has_one_row(width):
    lines = rows(until(DOWNLOADING), width)
    assert len(lines) == 3
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("a  fetch org/a-")
    assert lines[0].endswith("download, 31.2 of 72.4 GB, 412 MB/s, 2 min left")
    assert lines[2].startswith("1:15  model and image")


def test_screen_shows_that_other_hosts_wait_during_a_rollback():
    log = LOG.replace("Serve | Serve the release on", "Rollback | Roll back on")
    transcript, _ = read(log[: log.index("[a]  rollout of")])
    first, second, _ = rows(transcript)
    assert first.split() == ["a", "Rollback:", "Roll", "back", "on", "a"]
    assert second.split() == ["b", "waiting", "for", "a"]
    assert transcript.part == "engine"
    assert read(log)[0].hosts["b"].failed_step == "Rollback: Roll back on b"


def test_check_warnings_are_printed_immediately():
    _, printed = read(f"    [a] {CHECK_WARNING} repeat: two answers differ\n    [b]  Success\n")
    assert printed == ["a: check warning: repeat: two answers differ"]


HEADLINE = "b still serves x with agent; the new release was rejected: it answers garbage"


def test_failures_are_printed_immediately():
    assert read(LOG)[1] == [HEADLINE]
    lines = [line for line in LOG.splitlines(keepends=True) if "[b]  b still" not in line]
    assert read("".join(lines))[1] == [
        "b: FAILED in Serve: Serve the release on b",
        "  main-bbbbbbbbbbbb: serves main-aaaaaaaaaaaa",
        "  main-bbbbbbbbbbbb: rolled-back in phase check: it answers garbage",
        "  engine log: /cache/b-engine.log",
    ]


def test_summary_of_a_failed_host_starts_with_the_release_it_serves():
    lines = summary(read(LOG)[0], 1).splitlines()
    assert lines[:4] == [
        HEADLINE,
        "  main-bbbbbbbbbbbb: rolled-back in phase check: it answers garbage",
        "  engine log: /cache/b-engine.log",
        "  changed 1 of 3 steps; failed in Serve: Serve the release on b",
    ]
    assert lines[4].startswith("a  serves x")


@pytest.mark.parametrize(
    ("detail", "progress"),
    [
        ("start: waited_s=95 loading weights, 31.2 of 72.4 GB, 48 s",
         "loading weights, 31.2 of 72.4 GB, 48 s (1:35)"),
        ("start: waited_s=95", "loading the engine, 1:35"),
        ("memory: waited_s=8 limit_s=90 1.0 GiB available, 2.0 GiB needed",
         "1.0 GiB available, 2.0 GiB needed (0:08)"),
        ("start: running", "loading the engine"),
    ],
)  # fmt: skip
def test_screen_shows_step_and_time_of_a_rollout(detail, progress):
    host = HostView("a")
    host.log(f"rollout of main-aaaaaaaaaaaa: {detail}")
    assert host.line() == ("engine", progress)


def test_summary_shows_the_result_its_proof_the_changes_and_the_times():
    text = summary(read(LOG)[0], 1)
    for part in (
        "a  serves x with profile v2 as x at http://127.0.0.1:8000/v1\n",
        "  proof: full check of 2026-11-22T08:01:58Z",
        "  changed 3 of 4 steps\n",
        "took 0:30 (host 0:04, model and image 0:05, engine 0:",
        "failed: exit code 1",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("part", "code", "running"),
    [
        (LOADING, 130, "still running on the host: loading weights"),
        (DOWNLOADING, 130, "still running on the host: fetch org/a-long-name"),
        ("[b]  Success", 130, None),
        (LOADING, 1, None),
    ],
)
def test_summary_of_an_interrupted_deploy_lists_work_still_running(part, code, running):
    text = summary(until(part), code)
    assert "a  not finished\n" in text
    assert running in text if running else "still running" not in text


def test_output_to_a_file_shows_changed_lines_every_30_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_screen.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    watcher = SimpleNamespace(transcript=until(DOWNLOADING))
    screen = progress_screen._PipedScreen(watcher, Console(file=out, width=80))
    for _ in range(100):
        now[0] += 1
        screen.refresh()
    assert out.getvalue().splitlines() == [
        "a: fetch org/a-long-name-of-it: download, 31.2 of 72.4 GB, 412 MB/s, 2 min left",
        "b: Serve: Wait for all jobs",
    ]


def test_watch_returns_the_exit_code_and_saves_the_log(tmp_path):
    out, path = io.StringIO(), tmp_path / "deep" / "up.log"

    def run(watcher):
        watcher.log(LOG)
        return 1

    assert watch(run, ["a", "b"], path, Console(file=out, width=80)) == 1
    lines = [line.partition(" ") for line in path.read_text().splitlines()]
    assert [text for _, _, text in lines if text] == [line for line in LOG.splitlines() if line]
    assert all(0 <= float(at_s) < 60 for at_s, _, _ in lines)
    assert f"pyinfra's log: {path}" in out.getvalue()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit(130)])
def test_an_interrupted_deploy_exits_with_130(interrupt, tmp_path):
    def run(watcher):
        raise interrupt

    out = io.StringIO()
    assert watch(run, ["a"], tmp_path / "up.log", Console(file=out, width=80)) == 130
    assert "work on hosts continues" in out.getvalue()


def test_deploy_that_connects_to_no_host_shows_only_the_reason():
    log = """\
--> Loading config...
--> Connecting to hosts...
    [a] Could not connect (Unable to connect)

--> Disconnecting from hosts...
--> pyinfra error: No hosts remaining!"""
    lines = summary(read(log)[0], 1).splitlines()
    assert "  Could not connect (Unable to connect)" in lines
    assert "--> pyinfra error: No hosts remaining!" in lines
    assert not [line for line in lines if line.endswith("...") or not line.strip()]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_long_lines_are_wrapped_only_in_a_terminal(width):
    words = " ".join(f"word{number}" for number in range(60))
    terminal, file = io.StringIO(), io.StringIO()
    console = Console(file=terminal, width=width, force_terminal=True)
    progress_screen.print_text(Text(f"  {words}"), console)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split() == words.split()
    assert all(line.startswith("    ") for line in lines[1:])
    progress_screen.print_text(Text(f"  {words}"), Console(file=file, width=width))
    assert file.getvalue() == f"  {words}\n"
