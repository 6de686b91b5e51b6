"""A run prints progress at least every ten seconds and sends small packets without delay."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from pathlib import Path

from tests.host.conftest import Fleet
from tests.labkit import CHECKOUT
from tests.runs import read_output

LONGEST_SILENCE_S = 10


def test_first_run_prints_progress(fleet: Fleet) -> None:
    # Packages, Docker, downloads, the build and both engines.
    assert fleet.first.seconds > 3 * LONGEST_SILENCE_S
    assert fleet.first.silence.seconds <= LONGEST_SILENCE_S, fleet.first.silence


def test_slow_job_and_slow_engine_print_progress(fleet: Fleet) -> None:
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
        output, silence = read_output(run.stdout, began)
    finally:
        guest.run(f"rm {slow}; systemctl daemon-reload")
        run.kill()
    took_s = time.monotonic() - began

    assert run.wait(timeout=60) == 0, output[-4000:]
    assert took_s > job_s + load_s
    assert silence.seconds <= LONGEST_SILENCE_S, silence
    fleet.settle()


def test_every_connection_sets_tcp_nodelay(fleet: Fleet) -> None:
    # Read from the kernel, for the sockets of a running command.
    deploy = options_of(fleet.site.start())
    doctor = options_of(
        subprocess.Popen(
            fleet.site.cli_command("doctor"), cwd=CHECKOUT, stdout=subprocess.DEVNULL, text=True
        )
    )
    for options in (deploy, doctor):
        assert {address for address, _ in options} == {guest.ip for guest in fleet.guests}
        assert set(options.values()) == {1}, options


def options_of(run: subprocess.Popen[str]) -> dict[tuple[str, str], int]:
    options: dict[tuple[str, str], int] = {}
    while run.poll() is None:
        options |= no_delay_by_connection(run.pid)
        time.sleep(0.05)
    run.communicate()
    return options


def no_delay_by_connection(pid: int) -> dict[tuple[str, str], int]:
    options = {}
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
        with socket.socket(fileno=copy) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                address, port = connection.getpeername()[:2]
            except OSError:
                continue
            if port == 22:
                option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                options[address, link] = option
    os.close(pidfd)
    return options


PIDFD_GETFD = 438  # the same on every architecture; not in Python's standard library
