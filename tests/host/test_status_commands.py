"""doctor, status and connect: before an install, while hosts serve, and for clients."""

from __future__ import annotations

import json
import socket
import subprocess
import time

import pytest

from tests.host.conftest import FIRST, SECOND, Fleet
from tests.labkit import lab


def row(text: str, title: str) -> str:
    rows = [line.strip() for line in text.splitlines() if line.strip().startswith(title)]
    assert len(rows) == 1, text
    return rows[0].removeprefix(title).strip()


def test_doctor_checks_bare_host_without_changing_it(fleet: Fleet) -> None:
    bare = fleet.bare
    alone, both = bare.doctor_first, bare.doctor_both

    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert f"{FIRST}: a deploy would go ahead" in alone.stdout
    assert "NVIDIA GB10" in row(alone.stdout, "gpu")
    assert row(alone.stdout, "serving") == "no managed service"
    assert bare.new_files == ""
    # The second host is new: no host key recorded, no SSH key installed.
    assert both.returncode == 1
    assert f"{FIRST}: a deploy would go ahead" in both.stdout
    [other] = [line for line in both.stdout.splitlines() if line.startswith(f"{SECOND}: ")]
    assert "unreachable" in other
    assert "No host key" in other
    assert "fix: run `spark-deploy up`" in other
    assert "Traceback" not in alone.stderr + both.stderr


def test_doctor_reports_refusal_with_fix(fleet: Fleet) -> None:
    lab("break", "no-driver", FIRST)
    try:
        seen, as_data = fleet.site.cli("doctor"), fleet.site.cli("doctor", "--json")
    finally:
        lab("break", "no-driver", FIRST, "--heal")
    healed = fleet.site.cli("doctor")

    assert seen.returncode == as_data.returncode == 1
    assert f"{FIRST}: a deploy would refuse it for 1 reason\n" in seen.stdout
    assert "couldn't communicate with the NVIDIA driver" in row(seen.stdout, "REFUSED")
    assert "reboot" in row(seen.stdout, "fix:")
    assert f"{SECOND}: a deploy would go ahead" in seen.stdout
    counts = {host["host"]: len(host["problems"]) for host in json.loads(as_data.stdout)}
    assert counts == {FIRST: 1, SECOND: 0}
    assert healed.returncode == 0, healed.stdout


def test_status_and_doctor_report_findings_of_daily_check(
    fleet: Fleet,
) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    assert guest.run("systemctl is-enabled spark-daily.timer") == "enabled"
    assert guest.run("systemctl is-active spark-daily.timer") == "active"
    watch = guest.serving()[0].replace("spark-serve@", "spark-watch@")
    guest.run(f"systemctl stop {watch}; systemctl start spark-daily.service")
    status, doctor = (fleet.site.cli(verb, "--limit", FIRST) for verb in ("status", "doctor"))
    guest.run(f"systemctl start {watch}; systemctl start spark-daily.service")
    repaired = fleet.site.cli("status", "--limit", FIRST)
    for shown in (status, doctor):
        assert f"{watch} does not run" in shown.stdout, shown.stdout + shown.stderr
    assert watch not in repaired.stdout


def test_status_shows_release_and_differences_from_plan(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    release = guest.release()

    good = fleet.site.cli("status", "--limit", FIRST)
    other = fleet.site.cli("status", "--limit", FIRST, "--profile", "v2-tq")
    guest.run("systemctl stop spark-gateway@main")
    shut = fleet.site.cli("status", "--limit", FIRST)
    fleet.settle()

    assert good.returncode == 0, good.stdout
    assert f"{FIRST}: lab-stub with v2 as lab-model ({release})" in good.stdout
    assert row(good.stdout, "plan") == "as planned"
    # After a boot the newest check is a quick check.
    assert row(good.stdout, "proof").startswith(("full check", "quick check"))
    assert row(good.stdout, "live").startswith("answered in")
    assert other.returncode == shut.returncode == 1
    assert row(other.stdout, "plan").startswith(
        f"serves {release} (wants lab-stub with v2-tq, main-"
    )
    assert "gateway" in row(shut.stdout, "plan")


def test_printed_connect_commands_work(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    printed = fleet.site.cli("connect", "--limit", FIRST)
    assert printed.returncode == 0, printed.stderr
    text = printed.stdout
    assert row(text, "base URL") == "http://127.0.0.1:8000/v1 (here, through the tunnel below)"
    assert row(text, "model") == guest.names()[0]
    where, how = row(text, "API key").removesuffix(" on the host"), row(text, "read it")
    key = subprocess.run(how, shell=True, capture_output=True, text=True, check=True).stdout.strip()
    assert key == guest.run(f"cat {where}")
    assert key not in text

    # Separate shells, as in two terminals.
    tunnel = subprocess.Popen(["bash", "-c", "exec " + row(text, "from here")],
                              stdin=subprocess.DEVNULL)  # fmt: skip
    try:
        wait_for_port(8000, tunnel)
        answer = subprocess.run(
            ["bash", "-c", row(text, "try")], capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        tunnel.terminate()
        tunnel.wait(timeout=20)
    assert "35352137" in json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_tunnel_fails_if_port_is_taken(fleet: Fleet) -> None:  # else a stranger gets the key
    line = row(fleet.site.cli("connect", "--limit", FIRST).stdout, "from here")
    with socket.create_server(("127.0.0.1", 8000)):
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, timeout=30, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode != 0
    assert "8000" in done.stderr


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"no listener on port {port}")
