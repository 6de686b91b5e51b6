"""Day and night: releases with times of their own, and the timers that change between them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.config.errors import SettingsError
from spark_deploy.plan.host import document
from spark_deploy.plan.jobs import keep_of
from spark_deploy.plan.release import release_files_of, timer_files
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import plan_of

NIGHT = {"model": "large", "profile": "v2-tq"}
DAY = {"model": "large", "profile": "v2"}
TIMES = [{"at": "Mon..Fri 08:00", **DAY}, {"at": "20:00", **NIGHT}, {"at": "Sun 10:00", **DAY}]


def planned(*times: dict[str, Any], **more: Any) -> HostPlan:
    return plan_of("large", "v2", keep_ready=[NIGHT], schedule=list(times or TIMES), **more)


def test_each_time_leads_to_what_a_deploy_of_its_pair_would_serve() -> None:
    plan = planned()
    assert [one.at for one in plan.schedule] == ["Mon..Fri 08:00", "20:00", "Sun 10:00"]
    day, night, again = (one.release for one in plan.schedule)
    assert day == again == plan.serve == plan_of("large", "v2").serve
    assert night == plan_of("large", "v2-tq").serve


def test_every_release_of_a_schedule_lies_on_the_host_and_survives_a_prune() -> None:
    plan = planned()
    paths = {file.path for file in release_files_of(plan)}
    for release in {one.release.name for one in plan.schedule}:
        assert f"/etc/spark/releases/{release}/release.json" in paths
        assert f"/etc/systemd/system/spark-serve@{release}.service.d/50-release.conf" in paths
    assert keep_of(plan).releases == {one.release.name for one in plan.schedule}
    assert plan.serve.name in document(plan)["unit"]["drop_in"]


def test_a_release_has_one_timer_with_all_of_its_times() -> None:
    plan = planned()
    files = {file.path: file.content.decode() for file in timer_files(plan.schedule)}
    assert len(files) == 2
    day = files[f"/etc/systemd/system/spark-hours@{plan.serve.name}.timer"]
    assert re.findall("^OnCalendar=(.*)$", day, re.M) == ["Mon..Fri 08:00", "Sun 10:00"]
    assert f"\nUnit=spark-switch@{plan.serve.name}.service\n" in day


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_timers_and_their_times(tmp_path: Path) -> None:
    plan = planned()
    for file in timer_files(plan.schedule):
        name = Path(file.path).name
        (tmp_path / name).write_bytes(file.content)
        unit = name.replace("spark-hours@", "spark-switch@").replace(".timer", ".service")
        (tmp_path / unit).write_text("[Service]\nExecStart=/bin/true\n")
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
            capture_output=True, text=True, check=False,
            env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:/lib/systemd/system", "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert [line for line in done.stderr.splitlines() if "spark-" in line] == []
    for at in [one["at"] for one in TIMES] + ["20:00 Europe/Berlin", "*-*-1 02:30"]:
        subprocess.run(["systemd-analyze", "calendar", at], check=True, capture_output=True)
        planned({"at": at, **DAY}, {"at": "20:00", **NIGHT})


@pytest.mark.parametrize(
    ("times", "what"),
    [
        ([{"at": "20:00", "model": "small", "profile": "v2"}, TIMES[0]], "is not kept ready"),
        ([TIMES[1]], "no time leads back to large with v2"),
        ([{"at": "20:00\nUnit=reboot.target", **DAY}], "the required form"),
        ([{"at": "", **DAY}], "the required form"),
        ([{**DAY}], "at"),
    ],
)
def test_a_schedule_that_leads_nowhere_is_refused_with_the_settings(
    times: list[dict[str, Any]], what: str
) -> None:
    with pytest.raises(SettingsError, match=what):
        planned(*times)


def test_a_member_of_a_cluster_does_not_change_alone() -> None:
    with pytest.raises(SettingsError, match="members of a cluster change together"):
        planned(**{"cluster.hosts": ["a", "b"]})


def test_without_a_schedule_nothing_of_it_is_there() -> None:
    plan = plan_of("large", "v2")
    assert (plan.schedule, timer_files(plan.schedule)) == ((), ())
