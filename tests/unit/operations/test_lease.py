import fcntl
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyinfra.api.command import FunctionCommand

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SettingsError
from spark_deploy.hosts import operations
from spark_deploy.hosts.operations import host_operation, lease_script, this_run, unlock_script
from tests.unit.operations.fake_host import FakeHost, local_shell, on

MACHINE = this_run().rpartition("-")[0]
DEAD = f"{MACHINE}-{2**30}"
OTHER = "feedbeef-77"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "LEASE", str(tmp_path / "lease"))
    return tmp_path / "lease"


def take(path, token, who):
    return local_shell(lease_script(str(path), token, who)).strip()


def release(path, token):
    local_shell(unlock_script(str(path), token))


def local_host():
    host = FakeHost(shell=lambda script: local_shell(shlex.split(script)[-1]))
    host.data = {}
    return host


@host_operation
def change():
    yield "first"
    yield "second"


@host_operation
def do_nothing():
    yield from ()


@host_operation
def never_reached():
    raise AssertionError("a host was inspected while another run changes it")
    yield


def run(host, body=change, executing=True):
    with on(host, executing) as state:
        state.callback_handlers = [operations.ReturnLeases()]
        operations.hold_lease(state, host)
        commands = [
            f"refused: {command.args[0]}" if isinstance(command, FunctionCommand) else str(command)
            for command in body._inner()
        ]
    lease = operations._leases.get(host)
    if lease is not None and lease.renewal is not None:
        lease.renewal.kill()
    return commands


def test_lease_is_held_from_the_first_command_to_the_end(path):
    host = local_host()
    assert run(host) == ["first", "second"]
    token, _, since, who = path.read_text().split()
    assert (token, who) == (this_run(), operations.lease_holder())
    assert since.endswith("Z")
    operations.ReturnLeases.host_disconnect(None, host)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("body", [change, never_reached])
@pytest.mark.parametrize("token", [OTHER, f"{MACHINE}-{os.getppid()}"], ids=["remote", "local"])
def test_host_leased_by_another_run_is_rejected(path, token, body):
    assert take(path, token, "ben@laptop") == "acquired"
    [refusal] = run(local_host(), body)
    assert "ben@laptop started a change at 20" in refusal
    assert path.read_text().startswith(token)


def test_missing_sudo_password_is_not_reported_as_a_lost_host(path):
    def needs_password(script):
        raise SettingsError.single("sudo", "needs a password", "run deploys/bootstrap.py once")

    host = FakeHost(shell=needs_password)
    host.data = {}
    [refusal] = run(host)
    assert "run deploys/bootstrap.py once" in refusal


def test_lease_of_a_killed_local_run_is_taken_over(path):
    take(path, DEAD, "ann@desk")
    assert run(local_host()) == ["first", "second"]
    assert path.read_text().startswith(this_run())


def test_dry_runs_and_unchanged_hosts_acquire_no_lease(path):
    take(path, OTHER, "ben@laptop")
    assert run(local_host(), executing=False) == ["first", "second"]
    path.unlink()
    assert run(local_host(), executing=False) == ["first", "second"]
    assert run(local_host(), do_nothing) == []
    assert not path.exists()


def test_lease_expires_some_time_after_the_last_renewal(path):
    take(path, OTHER, "ben@laptop")
    _, expires_at, started_at, _ = path.read_text().split()
    assert take(path, OTHER, "ben@laptop") == "acquired"
    assert path.read_text().split()[2] == started_at
    uptime_s = int(Path("/proc/uptime").read_text().split(".")[0])
    assert 0 < int(expires_at) - uptime_s <= operations.TTL_S
    path.write_text(f"{OTHER} {uptime_s - 1} {started_at} ben@laptop\n")
    assert take(path, "another-1", "ann@desk") == "acquired"


@pytest.mark.parametrize("content", ["", "\n", "x", "x y z\n", "\0\0", "a 99999999999 s $(id)\n"])
def test_damaged_lease_expires_and_is_never_executed_as_code(path, content):
    path.write_text(content)
    assert re.fullmatch(r"acquired|held a \d+ s \$\(id\)", take(path, OTHER, "ben@laptop"))


def test_waiting_run_locks_the_new_file_if_the_lock_file_was_replaced(path):
    lock = Path(f"{path}.lock")
    script = ["sh", "-c", lease_script(str(path), OTHER, "ann@desk")]
    with lock.open("w") as removed:
        fcntl.flock(removed, fcntl.LOCK_EX)
        waiting = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
        time.sleep(0.5)
        lock.unlink()
        with lock.open("w") as current:
            fcntl.flock(current, fcntl.LOCK_EX)
            fcntl.flock(removed, fcntl.LOCK_UN)
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(1)
    assert waiting.communicate(timeout=10)[0] == "acquired\n"


def test_other_users_of_the_host_cannot_lock_the_lease(path):
    # A user with read access to a file can lock it.
    lock = Path(f"{path}.lock")
    take(path, OTHER, "ann@desk")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    lock.unlink()
    release(path, "beef-1")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_only_the_holder_can_return_the_lease(path):
    take(path, OTHER, "ben@laptop")
    release(path, this_run())
    assert path.exists()
    release(path, OTHER)
    assert not path.exists()


def test_lease_holder_is_shown_without_control_characters(path):
    path.write_text(f"{OTHER} 99999999999 s \x1b[2Jroot\n")
    [refusal] = run(local_host())
    assert "\x1b" not in refusal


SLOW = """
from pyinfra.context import host, state
from spark_deploy.hosts import operations
operations.LEASE = "{0}/lease"
operations.hold_lease(state, host)
@operations.host_operation
def slow():
    yield "sleep 30"
    yield "touch {0}/more"
slow(name="slow")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_run_ends_at_once_and_returns_its_lease(tmp_path, number):
    (tmp_path / "slow.py").write_text(SLOW.format(tmp_path))
    process = subprocess.Popen(
        [Path(sys.executable).with_name("pyinfra"), "@local", "slow.py", "-y"], cwd=tmp_path,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'files/contract'}"},
        # nohup or CI may ignore the signal in this process.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # fmt: skip
    while not (tmp_path / "lease").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=15)
    assert process.returncode == 128 + number
    assert output.count("interrupted: locks released") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slow.py"]
