"""systemd accepts the units, and no unit restarts forever."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from stub_host import REPOSITORY

from spark_deploy.plan.release import limits, start_limits
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import shipped

UNITS = REPOSITORY / "files" / "units"
RELEASES = [plan.serve for _, _, plan in shipped() if isinstance(plan, HostPlan)]


def section(unit: str, name: str) -> dict[str, str]:
    return dict(parsed((UNITS / unit).read_text())[name])


def parsed(text: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_every_unit(tmp_path: Path) -> None:
    program = tmp_path / "spark-host"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for unit in UNITS.iterdir():
        if unit.suffix in (".service", ".target", ".timer"):
            text = unit.read_text().replace(
                "/usr/local/lib/spark/current/bin/spark-host", str(program)
            )
            (tmp_path / unit.name).write_text(text)
    for neighbour in ("docker.service",):
        (tmp_path / neighbour).write_text(f"[Service]\nExecStart={program}\n")
    instances = [
        str(tmp_path / path.name.replace("@.", "@main-0123456789ab."))
        for path in UNITS.iterdir()
        if path.suffix in (".service", ".target", ".timer")
    ]
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *instances],
        capture_output=True,
        text=True,
        check=False,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:/lib/systemd/system", "PATH": "/usr/bin:/bin"},
    )
    ours = [line for line in said.stderr.splitlines() if "spark-" in line or str(tmp_path) in line]
    assert ours == []


def outlasts_all_its_starts(unit: dict[str, str], service: dict[str, str]) -> bool:
    commands = section("spark-serve@.service", "Service")
    starting = [name for name in commands if name.startswith("ExecStart")]
    stopping = [name for name in commands if name.startswith("ExecStop")]
    assert (len(starting), len(stopping)) == (3, 2)
    longest_s = (
        len(starting) * int(service["TimeoutStartSec"])
        + (len(stopping) + 1) * int(service["TimeoutStopSec"])  # and the signals between the two
        + int(service["RestartSec"])
    )
    return int(unit["StartLimitIntervalSec"]) > int(unit["StartLimitBurst"]) * longest_s


def test_start_limit_can_trigger() -> None:
    unit = section("spark-serve@.service", "Unit")
    service = section("spark-serve@.service", "Service")
    assert outlasts_all_its_starts(unit, service)
    assert service["Restart"] == "always"


def test_start_limit_of_every_planned_release_can_trigger() -> None:
    assert len(RELEASES) > 10
    for release in RELEASES:
        drop_in = parsed(limits(release))
        assert outlasts_all_its_starts(dict(drop_in["Unit"]), dict(drop_in["Service"]))


def test_log_rate_limit_allows_a_start() -> None:
    service = section("spark-serve@.service", "Service")
    interval_s, burst = (int(service[f"LogRateLimit{name}"]) for name in ("IntervalSec", "Burst"))
    assert interval_s > 0  # with 0 the limit is from journald.conf
    assert 5_000 <= burst <= 20_000
    assert burst / interval_s <= 500


def test_docker_upgrade_restarts_the_server() -> None:
    unit = section("spark-serve@.service", "Unit")
    assert "docker.service" not in unit.get("Requires", "")
    assert "docker.service" in unit["After"]


def test_reference_lists_exposure_of_every_unit(tmp_path: Path) -> None:
    page = (REPOSITORY / "SECURITY.md").read_text()
    stated = dict(re.findall(r"^\| `(spark-\w+@?)` \| (\d\.\d) \|", page, re.M))
    assert set(stated) == {path.name.removesuffix(".service") for path in UNITS.glob("*.service")}
    tool = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=True)
    # Other versions of the tool weigh a little differently.
    same = tool.stdout.split()[1] == re.search(r"of systemd (\d+)", page)[1]
    for unit, exposure in stated.items():
        name = f"{unit}main-0123456789ab" if unit.endswith("@") else unit
        instance = tmp_path / f"{name}.service"
        shutil.copy(UNITS / f"{unit}.service", instance)
        said = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--no-pager", str(instance)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        measured = re.search(r"exposure level for \S+: (\d+\.\d)", said)[1]
        assert float(measured) == pytest.approx(float(exposure), abs=0.01 if same else 0.5), unit


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_printed_lines_cannot_set_a_log_level(unit: str) -> None:
    # journald would print lines with <0> on every terminal of the host.
    assert section(unit, "Service").get("SyslogLevelPrefix") == "no"


def test_failed_server_waits_before_restart() -> None:
    assert int(section("spark-serve@.service", "Service")["RestartSec"]) >= 60
    assert min(start_limits(release)["delay_s"] for release in RELEASES) >= 60
