"""Looking at hosts: before an install, while they serve, and how to talk to them."""

from __future__ import annotations

import json
import socket
import subprocess
import time

import pytest

from tests.host.conftest import FIRST, SECOND, Fleet
from tests.labkit import lab


def row(text: str, title: str) -> str:
    """Return what one line of a command's output says under its title."""
    found = [line.strip() for line in text.splitlines() if line.strip().startswith(title)]
    assert len(found) == 1, text
    return found[0].removeprefix(title).strip()


def test_doctor_judges_a_bare_host_and_leaves_it_as_it_was(fleet: Fleet) -> None:
    bare = fleet.bare
    one, both = bare.doctor_first, bare.doctor_both

    assert one.returncode == 0, one.stdout + one.stderr
    assert f"{FIRST}: a deploy would go ahead" in one.stdout
    assert "NVIDIA GB10" in row(one.stdout, "gpu")
    assert row(one.stdout, "serving") == "no managed service"
    assert bare.new_files == ""
    # The other one is as new as out of the box: no host key recorded, no key of ours in it.
    assert both.returncode == 1
    assert f"{FIRST}: a deploy would go ahead" in both.stdout
    [other] = [line for line in both.stdout.splitlines() if line.startswith(f"{SECOND}: ")]
    assert "unreachable" in other
    assert "No host key" in other
    assert "fix: run `spark-deploy up`" in other
    assert "Traceback" not in one.stderr + both.stderr


def test_doctor_says_what_a_deploy_would_refuse_and_how_to_mend_it(fleet: Fleet) -> None:
    lab("break", "no-driver", FIRST)
    try:
        seen, as_data = fleet.site.look("doctor"), fleet.site.look("doctor", "--json")
    finally:
        lab("break", "no-driver", FIRST, "--heal")
    healed = fleet.site.look("doctor")

    assert seen.returncode == as_data.returncode == 1
    assert f"{FIRST}: a deploy would refuse it for 1 reason\n" in seen.stdout
    assert "couldn't communicate with the NVIDIA driver" in row(seen.stdout, "REFUSED")
    assert "reboot" in row(seen.stdout, "fix:")
    assert f"{SECOND}: a deploy would go ahead" in seen.stdout
    counts = {one["host"]: len(one["problems"]) for one in json.loads(as_data.stdout)}
    assert counts == {FIRST: 1, SECOND: 0}
    assert healed.returncode == 0, healed.stdout


def test_the_daily_look_runs_by_itself_and_status_and_doctor_tell_what_it_found(
    fleet: Fleet,
) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    assert guest.run("systemctl is-enabled spark-daily.timer") == "enabled"
    assert guest.run("systemctl is-active spark-daily.timer") == "active"
    watch = guest.serving()[0].replace("spark-serve@", "spark-watch@")
    guest.run(f"systemctl stop {watch}; systemctl start spark-daily.service")
    status, doctor = (fleet.site.look(verb, "--limit", FIRST) for verb in ("status", "doctor"))
    guest.run(f"systemctl start {watch}; systemctl start spark-daily.service")
    mended = fleet.site.look("status", "--limit", FIRST)
    for said in (status, doctor):
        assert f"{watch} does not run" in said.stdout, said.stdout + said.stderr
    assert watch not in mended.stdout


def test_status_says_what_is_served_and_notices_what_is_not_as_planned(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    release = guest.serving()[0].removeprefix("spark-serve@").removesuffix(".service")

    good = fleet.site.look("status", "--limit", FIRST)
    other = fleet.site.look("status", "--limit", FIRST, "--profile", "v2-tq")
    guest.run("systemctl stop spark-gateway@main")
    shut = fleet.site.look("status", "--limit", FIRST)
    fleet.settle()

    assert good.returncode == 0, good.stdout
    assert f"{FIRST}: lab-stub with v2 as lab-model ({release})" in good.stdout
    assert row(good.stdout, "plan") == "as planned"
    # After a boot the newest check is the quick one that every start ends with.
    assert row(good.stdout, "proof").startswith(("full check", "quick check"))
    assert row(good.stdout, "live").startswith("answered in")
    assert other.returncode == shut.returncode == 1
    assert row(other.stdout, "plan").startswith(
        f"serves {release} (wants lab-stub with v2-tq, main-"
    )
    assert "gateway" in row(shut.stdout, "plan")


def test_the_lines_of_connect_work_as_they_are_printed(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    printed = fleet.site.look("connect", "--limit", FIRST)
    assert printed.returncode == 0, printed.stderr
    text = printed.stdout
    assert row(text, "base URL") == "http://127.0.0.1:8000/v1 (here, through the tunnel below)"
    assert row(text, "model") == guest.names()[0]
    where, how = row(text, "API key").removesuffix(" on the host"), row(text, "read it")
    key = subprocess.run(how, shell=True, capture_output=True, text=True, check=True).stdout.strip()
    assert key == guest.run(f"cat {where}")
    assert key not in text

    # In a shell of their own each, as in two terminals.
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


def test_a_tunnel_that_cannot_have_its_port_ends_instead_of_handing_the_key_to_a_stranger(
    fleet: Fleet,
) -> None:
    line = row(fleet.site.look("connect", "--limit", FIRST).stdout, "from here")
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
    pytest.fail(f"nothing listens on port {port}")
