import json
import socket
import subprocess
from typing import Any

from tests.host.conftest import FIRST, SECOND
from tests.labkit import wait_for_port


def row(text, title):
    rows = [line.strip() for line in text.splitlines() if line.strip().startswith(title)]
    assert len(rows) == 1, text
    return rows[0].removeprefix(title).strip()


def test_doctor_checks_bare_host_without_changing_it(fleet):
    alone, both = fleet.bare.doctor_first, fleet.bare.doctor_both
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert "NVIDIA GB10" in row(alone.stdout, "gpu")
    assert fleet.bare.new_files == ""
    # The second host is new: no host key recorded, no SSH key installed.
    assert both.returncode == 1
    [unreachable] = [line for line in both.stdout.splitlines() if line.startswith(f"{SECOND}: ")]
    assert "unreachable" in unreachable
    assert "fix: run `spark-deploy up`" in unreachable
    assert "Traceback" not in alone.stderr + both.stderr


def test_status_and_doctor_report_findings_of_daily_check(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    timer = guest.unit("spark-daily.timer", "UnitFileState", "ActiveState")
    assert timer == {"UnitFileState": "enabled", "ActiveState": "active"}
    watch = guest.serving()[0].replace("spark-serve@", "spark-watch@")
    guest.run(f"systemctl stop {watch}; systemctl start spark-daily.service")
    status, doctor = (fleet.site.cli(verb, "--limit", FIRST) for verb in ("status", "doctor"))
    guest.run(f"systemctl start {watch}; systemctl start spark-daily.service")
    repaired = fleet.site.cli("status", "--limit", FIRST)
    assert watch in status.stdout
    assert watch in doctor.stdout
    assert watch not in repaired.stdout


def test_status_shows_release_and_differences_from_plan(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    release = guest.release()

    good = fleet.site.cli("status", "-v", "--limit", FIRST)
    other = fleet.site.cli("status", "-v", "--limit", FIRST, "--profile", "v2-tq")
    guest.run("systemctl stop spark-gateway@main")
    shut = fleet.site.cli("status", "-v", "--limit", FIRST)
    fleet.settle()

    assert good.returncode == 0, good.stdout
    assert f"{FIRST}: lab-stub with v2 as lab-model ({release})" in good.stdout
    assert row(good.stdout, "plan") == "as planned"
    assert other.returncode == shut.returncode == 1
    assert release in row(other.stdout, "plan")
    assert "v2-tq" in row(other.stdout, "plan")
    assert "gateway" in row(shut.stdout, "plan")


def test_commands_printed_by_connect_reach_the_server(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    printed = fleet.site.cli("connect", "--limit", FIRST)
    assert printed.returncode == 0, printed.stderr
    text = printed.stdout
    assert row(text, "base URL").startswith("http://127.0.0.1:8000/v1 ")
    assert row(text, "model") == guest.names()[0]
    key = subprocess.check_output(row(text, "read key"), shell=True, text=True).strip()
    assert key == guest.key()
    assert key not in text

    tunnel: subprocess.Popen[bytes] = subprocess.Popen(
        ["bash", "-c", "exec " + row(text, "tunnel")], stdin=subprocess.DEVNULL
    )
    try:
        wait_for_port(8000)
        answer: dict[str, Any] = json.loads(
            subprocess.check_output(["bash", "-c", row(text, "try")], text=True, timeout=60)
        )
    finally:
        tunnel.terminate()
        tunnel.wait(timeout=20)
    assert "35352137" in answer["choices"][0]["message"]["content"]


def test_tunnel_fails_if_the_local_port_is_taken(fleet):
    command = row(fleet.site.cli("connect", "--limit", FIRST).stdout, "tunnel")
    with socket.create_server(("127.0.0.1", 8000)):
        result = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert result.returncode != 0
