import configparser
import re
import shutil
import subprocess

import pytest
from stub_host import REPOSITORY, write_program

from spark_deploy.plan.release import limits_drop_in, start_limits
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import shipped

UNITS = REPOSITORY / "files" / "units"


@pytest.fixture(scope="module")
def releases():
    return [plan.release for _, _, plan in shipped() if isinstance(plan, HostPlan)]


def read_unit(text):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(text)
    return parser


def section(unit, name):
    return dict(read_unit((UNITS / unit).read_text())[name])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_every_unit(tmp_path):
    program = write_program(tmp_path / "spark-host", "")
    (tmp_path / "docker.service").write_text(f"[Service]\nExecStart={program}\n")
    units = [unit for unit in UNITS.iterdir() if unit.suffix in (".service", ".target", ".timer")]
    for unit in units:
        text = unit.read_text().replace("/usr/local/lib/spark/current/bin/spark-host", str(program))
        (tmp_path / unit.name).write_text(text)
    names = [str(tmp_path / unit.name.replace("@.", "@main-0123456789ab.")) for unit in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True, text=True, check=False,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:/lib/systemd/system", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "spark-" in line] == []


def limit_outlasts_all_starts(unit, service):
    commands = section("spark-serve@.service", "Service")
    starting = [name for name in commands if name.startswith("ExecStart")]
    stopping = [name for name in commands if name.startswith("ExecStop")]
    assert (len(starting), len(stopping)) == (3, 2)
    longest_s = (
        len(starting) * int(service["TimeoutStartSec"])
        + (len(stopping) + 1) * int(service["TimeoutStopSec"])
        + int(service["RestartSec"])
    )
    return int(unit["StartLimitIntervalSec"]) > int(unit["StartLimitBurst"]) * longest_s


def test_start_limit_of_the_unit_can_be_reached(releases):
    service = section("spark-serve@.service", "Service")
    assert limit_outlasts_all_starts(section("spark-serve@.service", "Unit"), service)
    assert service["Restart"] == "always"
    assert int(service["RestartSec"]) >= 60
    assert len(releases) > 10
    for release in releases:
        assert start_limits(release)["delay_s"] >= 60
        drop_in = read_unit(limits_drop_in(release))
        assert limit_outlasts_all_starts(dict(drop_in["Unit"]), dict(drop_in["Service"]))


def test_log_rate_limit_is_high_enough_for_an_engine_start():
    service = section("spark-serve@.service", "Service")
    interval_s, burst = (int(service[f"LogRateLimit{name}"]) for name in ("IntervalSec", "Burst"))
    assert interval_s > 0  # with 0 the limit is from journald.conf
    assert 5_000 <= burst <= 20_000
    assert burst / interval_s <= 500


def test_rejected_keys_cannot_flood_the_journal():
    service = section("spark-gateway@.service", "Service")
    assert int(service["LogRateLimitBurst"]) / int(service["LogRateLimitIntervalSec"]) < 1


def test_docker_upgrade_restarts_the_server():
    unit = section("spark-serve@.service", "Unit")
    assert "docker.service" not in unit.get("Requires", "")
    assert "docker.service" in unit["After"]


def test_reference_lists_exposure_of_every_unit(tmp_path):
    page = (REPOSITORY / "SECURITY.md").read_text()
    documented = dict(re.findall(r"^\| `(spark-[\w-]+@?)` \| (\d\.\d) \|", page, re.M))
    assert set(documented) == {
        path.name.removesuffix(".service") for path in UNITS.glob("*.service")
    }
    done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=True)
    # Other versions of systemd score slightly differently.
    same_version = done.stdout.split()[1] == re.search(r"in systemd\s+(\d+)", page)[1]
    tolerance = 0.01 if same_version else 0.5
    for unit, exposure in documented.items():
        name = f"{unit}main-0123456789ab" if unit.endswith("@") else unit
        instance = tmp_path / f"{name}.service"
        shutil.copy(UNITS / f"{unit}.service", instance)
        output = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--no-pager", str(instance)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        measured = re.search(r"exposure level for \S+: (\d+\.\d)", output)[1]
        assert float(measured) == pytest.approx(float(exposure), abs=tolerance), unit


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_printed_lines_cannot_set_a_log_level(unit):
    # journald would print lines with <0> on every terminal of the host.
    assert section(unit, "Service").get("SyslogLevelPrefix") == "no"
