"""Of two runs only one changes a host; the other says in one line who does."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.api.command import FunctionCommand

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.hosts import operations as lease
from spark_deploy.hosts.operations import host_errors
from tests.unit.operations.test_operations import FakeHost, on

# Of this machine, and no process has that number.
DEAD = f"{lease.this_run().rpartition('-')[0]}-{2**30}"
OTHER = "feedbeef-77"


class RealShell(FakeHost):
    """Runs what it is asked here, and says what changed."""

    data: Any = SimpleNamespace(get=lambda key: None)

    def run_shell_command(self, command: Any, **_: Any) -> tuple[bool, Any]:
        done = subprocess.run(
            ["sh", "-c", shlex.split(command.get_raw_value())[-1]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.stderr, done.stderr
        output = SimpleNamespace(stdout_lines=done.stdout.splitlines(), output=done.stdout)
        return done.returncode == 0, output


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lease, "LEASE", str(tmp_path / "lease"))
    return tmp_path / "lease"


def script(text: str) -> str:
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def take(path: Path, token: str, who: str, **more: Any) -> str:
    return script(lease.take_script(str(path), token, who, **more))


def changed(host: RealShell, executing: bool = True) -> list[str]:
    """Return what an operation that changes something comes to on ``host``."""

    @host_errors
    def body() -> Any:
        yield "first"
        yield "second"

    with on(host, executing) as state:
        state.callback_handlers = [lease.ReturnLeases()]
        lease.hold_lease(state, host)  # type: ignore[arg-type]
        commands = [
            f"refused: {one.args[0]}" if isinstance(one, FunctionCommand) else str(one)
            for one in body()
        ]
    held = lease._leases.get(host)  # type: ignore[call-overload]
    if held is not None and held.renewing is not None:
        held.renewing.kill()
    return commands


def test_a_free_host_is_taken_before_the_first_command_and_given_back(path: Path) -> None:
    host = RealShell({})
    assert changed(host) == ["first", "second"]
    token, _, since, who = path.read_text().split()
    assert (token, who) == (lease.this_run(), lease.holder())
    assert since.endswith("Z")
    lease.ReturnLeases.host_disconnect(None, host)  # type: ignore[arg-type]
    assert list(path.parent.iterdir()) == []


def test_a_host_that_another_run_changes_is_refused_in_one_line_and_left_alone(path: Path) -> None:
    assert take(path, OTHER, "ben@laptop") == "taken"
    [said] = changed(RealShell({}))
    assert said.startswith("refused: ")
    assert "ben@laptop has been changing this host since 20" in said
    assert "expires in" in said
    assert path.read_text().startswith(OTHER)


def test_a_run_of_this_machine_that_was_killed_holds_nobody_up(path: Path) -> None:
    take(path, DEAD, "ann@desk")
    assert changed(RealShell({})) == ["first", "second"]
    assert path.read_text().startswith(lease.this_run())


def test_a_run_of_this_machine_that_lives_is_respected(path: Path) -> None:
    alive = f"{lease.this_run().rpartition('-')[0]}-{os.getppid()}"
    take(path, alive, "ann@desk")
    [said] = changed(RealShell({}))
    assert "ann@desk has been changing" in said


def test_a_dry_run_takes_none(path: Path) -> None:
    take(path, OTHER, "ben@laptop")
    assert changed(RealShell({}), executing=False) == ["first", "second"]
    path.unlink()
    assert changed(RealShell({}), executing=False) == ["first", "second"]
    assert not path.exists()


def test_a_host_that_another_run_changes_is_not_even_looked_at(path: Path) -> None:
    take(path, OTHER, "ben@laptop")

    @host_errors
    def body() -> Any:
        raise AssertionError("what is half done was judged")
        yield

    host = RealShell({})
    with on(host) as state:
        state.callback_handlers = [lease.ReturnLeases()]
        lease.hold_lease(state, host)  # type: ignore[arg-type]
        [said] = body()
    assert "ben@laptop has been changing" in said.args[0]


def test_an_operation_that_finds_everything_right_takes_none(path: Path) -> None:
    host = RealShell({})

    @host_errors
    def body() -> Any:
        yield from ()

    with on(host) as state:
        state.callback_handlers = [lease.ReturnLeases()]
        lease.hold_lease(state, host)  # type: ignore[arg-type]
        assert list(body()) == []
    assert not path.exists()


def test_it_ends_by_itself_after_the_last_sign_and_is_renewed_by_its_own(path: Path) -> None:
    take(path, OTHER, "ben@laptop")
    _, until, since, _ = path.read_text().split()
    assert take(path, OTHER, "ben@laptop") == "taken"
    assert path.read_text().split()[2] == since
    uptime_s = int(Path("/proc/uptime").read_text().split(".")[0])
    assert 0 < int(until) - uptime_s <= lease.TTL_S
    path.write_text(f"{OTHER} {uptime_s - 1} {since} ben@laptop\n")
    assert take(path, "another-1", "ann@desk") == "taken"


@pytest.mark.parametrize("content", ["", "\n", "x", "x y z\n", "\0\0", "a 99999999999 s $(id)\n"])
def test_a_damaged_lease_stops_nobody_for_ever_and_runs_nothing(path: Path, content: str) -> None:
    path.write_text(content)
    said = take(path, OTHER, "ben@laptop")
    assert said == "taken" or said == "held a " + said.split()[2] + " s $(id)"


def test_a_user_of_the_host_cannot_hold_the_lock_that_runs_wait_for(path: Path) -> None:
    # Whoever may open a file to read it may flock it, for as long as he likes.
    lock = Path(f"{path}.lock")
    take(path, OTHER, "ann@desk")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    lock.unlink()
    script(lease.release_script(str(path), "beef-1"))
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_only_the_run_that_holds_it_gives_it_back(path: Path) -> None:
    take(path, OTHER, "ben@laptop")
    script(lease.release_script(str(path), lease.this_run()))
    assert path.exists()
    script(lease.release_script(str(path), OTHER))
    assert not path.exists()


def test_what_a_host_says_of_a_holder_is_a_plain_word(path: Path) -> None:
    path.write_text(f"{OTHER} 99999999999 s \x1b[2Jroot\n")
    [said] = changed(RealShell({}))
    assert "\x1b" not in said


# Two commands: an interrupted run ends in the first one, and never sends the second.
SLOW = """
from pyinfra.context import host, state
from pyinfra.api import operation
from spark_deploy.hosts import operations as lease
from spark_deploy.hosts.operations import host_errors
lease.LEASE = "{0}/lease"
lease.hold_lease(state, host)
@operation()
@host_errors
def slow():
    yield "sleep 30"
    yield "touch {0}/more"
slow(name="slow")
"""


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_an_interrupted_run_ends_at_once_and_gives_its_host_back(
    tmp_path: Path, how: signal.Signals
) -> None:
    (tmp_path / "slow.py").write_text(SLOW.format(tmp_path))
    run = subprocess.Popen(
        [Path(sys.executable).with_name("pyinfra"), "@local", "slow.py", "-y"], cwd=tmp_path,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # Whatever ignores a signal around the tests (nohup, CI) does not around this run.
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'files/contract'}"},
        preexec_fn=lambda: signal.signal(how, signal.SIG_DFL),
    )  # fmt: skip
    while not (tmp_path / "lease").exists():
        assert run.poll() is None
        time.sleep(0.02)

    run.send_signal(how)
    time.sleep(0.01)
    run.send_signal(how)  # by its parent, after the terminal
    said, _ = run.communicate(timeout=15)

    assert run.returncode == 128 + how
    assert said.count("interrupted: leases are returned") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slow.py"]
