"""What a run is like for the person who watches it: fast commands, and never silence."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from pathlib import Path

from tests.host.conftest import Fleet
from tests.labkit import CHECKOUT
from tests.runs import listened

LONGEST_SILENCE_S = 10


def test_the_first_run_on_bare_hosts_is_never_silent(fleet: Fleet) -> None:
    # Packages, docker, downloads, the build and both engines: everything that takes time.
    assert fleet.first.seconds > 3 * LONGEST_SILENCE_S
    assert fleet.first.silence.seconds <= LONGEST_SILENCE_S, fleet.first.silence


def test_a_slow_job_and_a_slow_engine_are_never_silent(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    job_s, load_s = 15, 40
    slow = "/run/systemd/system/spark-job@.service.d/slow.conf"
    guest.run(
        f"mkdir -p $(dirname {slow}); printf '[Service]\\nExecStartPre=sleep {job_s}\\n' > {slow}; "
        "systemctl daemon-reload; rm -r /srv/spark/models/*"
    )
    fleet.site.choose(engine={"environment": {"STUB_LOAD_S": str(load_s)}})
    began = time.monotonic()
    run = fleet.site.start("--limit", guest.name)
    assert run.stdout is not None
    try:
        said, silence = listened(run.stdout, began)
    finally:
        guest.run(f"rm {slow}; systemctl daemon-reload")
        run.kill()
    took_s = time.monotonic() - began

    assert run.wait(timeout=60) == 0, said[-4000:]
    assert took_s > job_s + load_s
    assert silence.seconds <= LONGEST_SILENCE_S, silence
    fleet.settle()


def test_every_connection_sends_small_packets_at_once(fleet: Fleet) -> None:
    # Asked of the kernel, about the sockets of a run that is under way.
    deploy = options_of(fleet.site.start())
    looking = options_of(
        subprocess.Popen(
            fleet.site.look_command("doctor"), cwd=CHECKOUT, stdout=subprocess.DEVNULL, text=True
        )
    )
    for seen in (deploy, looking):
        assert {address for address, _ in seen} == {guest.ip for guest in fleet.guests}
        assert set(seen.values()) == {1}, seen


def options_of(run: subprocess.Popen[str]) -> dict[tuple[str, str], int]:
    """Return what TCP_NODELAY last was on every SSH connection of a run."""
    seen: dict[tuple[str, str], int] = {}
    while run.poll() is None:
        seen |= no_delay_by_connection(run.pid)
        time.sleep(0.05)
    run.communicate()
    return seen


def no_delay_by_connection(pid: int) -> dict[tuple[str, str], int]:
    """Return TCP_NODELAY of each connection of a process to an SSH port, by peer and socket."""
    found = {}
    try:
        pidfd = os.pidfd_open(pid)
        links = [(int(fd.name), os.readlink(fd)) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return {}
    for fd, link in links:
        if not link.startswith("socket:"):
            continue
        copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, fd, 0)
        if copy < 0:
            continue
        with socket.socket(fileno=copy) as theirs:
            if theirs.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                address, port = theirs.getpeername()[:2]
            except OSError:
                continue
            if port == 22:
                option = theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                found[address, link] = option
    os.close(pidfd)
    return found


PIDFD_GETFD = 438  # the same number on every architecture; Python has no name for it
