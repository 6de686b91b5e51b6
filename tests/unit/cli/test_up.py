"""``up``: what it says while and after it runs pyinfra; and that it asks."""

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from spark_deploy.cli import progress_screen, query_hosts, up, update
from spark_deploy.cli.options import Options
from spark_deploy.cli.progress_screen import HostView, Transcript, minutes
from spark_deploy.cli.run_pyinfra import agreed
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SparkError
from spark_deploy.inventory.host_keys import Seen
from spark_deploy.inventory.login import Access
from spark_deploy.lock.resolve import Names
from tools.docs.replay import feed

RUN = """\
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
    [a]  rollout of main-aaaaaaaaaaaa: start: waited_s=95 last: (EngineCore) WARNING 11-22 odd
    [a]  Success
    [b]  Skipped

--> Starting operation: Serve | Serve the release on b
    [a]  Skipped
    [b]  main-bbbbbbbbbbbb: rolled-back in phase check: it answers garbage
    [b]    now serving: main-aaaaaaaaaaaa
    [b]  Error: executed 0 commands

--> Starting operation: Verify | Verify the service
    [a]  serves x with profile v2 as x at http://127.0.0.1:8000/v1
    [a]  proof: full check of 2026-11-22T08:01:58Z, 16 checks; one live answer in 0.1 s
    [a]  Success
"""


def read(text: str, step_s: float = 1.0) -> tuple[Transcript, list[str]]:
    seen = Transcript({name: HostView(name) for name in ("a", "b")})
    shown: list[str] = []
    for number, line in enumerate(text.splitlines()):
        shown += feed(seen, line, number * step_s)
    return seen, shown


def until(part: str) -> Transcript:
    return read(RUN[: RUN.index(part) + len(part)])[0]


def drawn(seen: Transcript, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(progress_screen.rows(seen, 75, width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_host_is_one_line_of_any_width(width):
    seen = until("2 min left")
    lines = drawn(seen, width)
    assert len(lines) == 3
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("a  fetch org/a-")
    assert lines[0].endswith("download, 31.2 of 72.4 GB, 412 MB/s, 2 min left")
    assert lines[2].startswith("1:15  model and image")


def test_an_engine_that_loads_is_told_by_its_phase_and_not_by_its_log():
    [a, _, _] = drawn(until("WARNING 11-22 odd"), 100)
    assert a.split() == ["a", "engine", "engine", "loads,", "1:35"]


def test_who_waits_for_another_host_says_so_and_a_rollback_is_the_engines_time():
    rollback = RUN.replace("Serve | Serve the release on", "Rollback | Go back on")
    seen, _ = read(rollback[: rollback.index("[a]  rollout of")])
    assert [line.split() for line in drawn(seen, 100)[:2]] == [
        ["a", "Rollback:", "Go", "back", "on", "a"], ["b", "waits", "for", "a"],
    ]  # fmt: skip
    assert seen.part == "engine"
    assert read(rollback)[0].hosts["b"].failed == "Rollback: Go back on b"


def test_what_failed_is_said_at_once_with_its_reason():
    _, shown = read(RUN)
    assert shown == [
        "b: FAILED in Serve: Serve the release on b",
        "  main-bbbbbbbbbbbb: rolled-back in phase check: it answers garbage",
        "    now serving: main-aaaaaaaaaaaa".replace("    ", "  ", 1),
    ]


def test_the_end_says_of_each_host_what_serves_how_proven_how_long_and_what_changed():
    seen, _ = read(RUN)
    text = "\n".join(str(line) for line in progress_screen.ended(seen, 1, 30))
    assert "a  serves x with profile v2 as x at http://127.0.0.1:8000/v1" in text
    assert "  proof: full check of 2026-11-22T08:01:58Z" in text
    assert "b  FAILED in Serve: Serve the release on b" in text
    assert "  changed 3 of 4 steps" in text
    assert "took 0:" in text
    assert "engine 0:" in text
    assert "red: exit code 1" in text


def test_who_leaves_is_told_what_hosts_went_on_with_and_not_that_nothing_changed():
    def end(part: str, code: int = 130) -> str:
        return "\n".join(str(line) for line in progress_screen.ended(until(part), code, 30))

    assert (
        "a  not finished\n"
        "  changed 1 of 2 steps up to then; changes went on when you left: engine loads, 1:35\n"
    ) in end("WARNING 11-22 odd")
    assert "went on when you left: fetch org/a-long-name" in end("2 min left")
    assert "when you left" not in end("[b]  Success")
    assert "when you left" not in end("WARNING 11-22 odd", code=1)


def test_piped_it_says_nothing_twice_and_a_line_each_half_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_screen.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    seen = until("2 min left")
    watcher = SimpleNamespace(seen=seen)
    piped = progress_screen._Piped(watcher, Console(file=out, width=80))
    for _ in range(100):
        now[0] += 1
        piped.look()
    assert out.getvalue().splitlines() == [
        "a: fetch org/a-long-name-of-it: download, 31.2 of 72.4 GB, 412 MB/s, 2 min left",
        "b: Serve: Wait for all jobs",
    ]


def test_it_returns_the_exit_code_and_keeps_every_log_line(tmp_path):
    out = io.StringIO()
    log = tmp_path / "deep" / "up.log"

    def run(watcher: progress_screen.Watcher) -> int:
        for line in RUN.splitlines():
            watcher.tell(line)
        return 1

    assert progress_screen.watch(run, ["a", "b"], log, Console(file=out, width=80)) == 1
    kept = [line.partition(" ") for line in log.read_text().splitlines()]
    assert [text for _, _, text in kept if text] == [line for line in RUN.splitlines() if line]
    assert all(0 <= float(at_s) < 60 for at_s, _, _ in kept)
    assert f"pyinfra's log: {log}" in out.getvalue()


def test_a_run_that_ends_before_its_first_step_shows_the_reason(tmp_path):
    def run(watcher: progress_screen.Watcher) -> int:
        watcher.tell("--> Loading inventory...\nhosts.yml: is odd\n  fix: correct it")
        return 1

    out = io.StringIO()
    console = Console(file=out, width=80)
    assert progress_screen.watch(run, ["a"], tmp_path / "up.log", console) == 1
    assert "hosts.yml: is odd" in out.getvalue()


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit(130)])
def test_an_interrupted_run_ends_with_130(signal, tmp_path):
    def run(watcher: progress_screen.Watcher) -> int:
        raise signal

    out = io.StringIO()
    console = Console(file=out, width=80)
    assert progress_screen.watch(run, ["a"], tmp_path / "up.log", console) == 130
    assert "work on hosts continues" in out.getvalue()


def test_without_a_terminal_it_wants_a_yes(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SparkError, match="needs a terminal"):
        agreed(False, "Go on?")
    agreed(True, "Go on?")


def run_up(*, dry: bool) -> int:
    return up.up.callback.__wrapped__(Options(inventory="inventory/lab.py", dry=dry))


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "to be done"])
def test_without_a_key_of_ours_it_says_so_before_it_asks_for_a_password(
    dry, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("HOME", str(tmp_path))
    host = SimpleNamespace(name="spark-1", data={})
    monkeypatch.setattr(up, "select_hosts", lambda _options: [host])
    monkeypatch.setattr(query_hosts.login, "try_key", lambda _one: Access(False, False))
    monkeypatch.setattr(
        query_hosts.host_keys, "look", lambda one: Seen(one, "spark-1", tmp_path, "new", None, None)
    )
    monkeypatch.setattr(up.run_pyinfra, "deploy", lambda *_: 1 / 0)
    with pytest.raises(SparkError, match="run `ssh-keygen -t ed25519`"):
        run_up(dry=dry)
    assert "password" not in capsys.readouterr().err


def test_a_dry_run_says_that_nothing_was_done_above_the_line_that_it_leaves_to_others(
    monkeypatch, capsys
):
    monkeypatch.setattr(up, "select_hosts", lambda _options: [])
    monkeypatch.setattr(up, "found_on", lambda _hosts, _plans: [])
    assert run_up(dry=True) == 0
    said, line = capsys.readouterr().err.splitlines()
    assert said == "nothing was done; to see every single step, run:"
    assert line.endswith("deploy.py --dry")


def test_a_wrong_inventory_is_red(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "spark_deploy", "up", str(tmp_path / "none.py"), "-y"],
        cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1
    assert "none.py: is not an inventory file" in done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "0:05"), (52.4, "0:52"), (374, "6:14"), (3723, "1:02:03")]
)
def test_times_are_said_as_people_say_them(seconds, text):
    assert minutes(seconds) == text


def test_names_are_locked_on_the_way_as_by_a_lock_command_that_nothing_was_asked_of(
    monkeypatch, tmp_path
):
    """As ``init`` and a first ``up`` do, whose own options are others."""
    place = tmp_path / "spark.lock.yml"
    host = SimpleNamespace(catalog=None, settings=SimpleNamespace(lock_path=place, settings=None))
    monkeypatch.setattr(update, "select_hosts", lambda _options: [host])
    monkeypatch.setattr(update, "wanted_by", lambda *_: Names(frozenset(), frozenset()))
    monkeypatch.setattr(update, "hold_if_told", lambda *words: words[2])
    assert update.lock_names(Options(), missing=True) == 0


def test_a_run_that_reaches_nobody_shows_the_reason_without_pyinfras_own_steps():
    said = [
        "--> Loading config...",
        "--> Connecting to hosts...",
        "    [spark-1] Could not connect (Unable to connect)",
        "",
        "--> Disconnecting from hosts...",
        "--> pyinfra error: No hosts remaining!",
    ]
    seen = Transcript({"spark-1": HostView("spark-1")})
    for line in said:
        feed(seen, line, 0.0)
    shown = [text.plain for text in progress_screen.ended(seen, 1, 1.0)]
    assert "  Could not connect (Unable to connect)" in shown
    assert "--> pyinfra error: No hosts remaining!" in shown
    assert not [line for line in shown if line.endswith("...") or not line.strip()]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_lines_of_a_run_break_between_words_at_a_terminal_and_nowhere_in_a_file(width):
    said = " ".join(f"word{number}" for number in range(60))
    there, piped = io.StringIO(), io.StringIO()
    progress_screen.lay(Text(f"  {said}"), Console(file=there, width=width, force_terminal=True))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", there.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split() == said.split()
    assert all(line.startswith("    ") for line in lines[1:])
    progress_screen.lay(Text(f"  {said}"), Console(file=piped, width=width))
    assert piped.getvalue() == f"  {said}\n"
