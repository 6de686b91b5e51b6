from dataclasses import replace

import pytest
from hosts import report_of

from spark_deploy.cli import plan
from spark_deploy.cli.plan_text import speed_lines
from spark_deploy.cli.report import Report, render_report
from spark_deploy.cli.report_contents import with_answers
from spark_deploy.plan.speed import Calibration, calibrated, compute_speed
from tests.unit.planning.plans import CATALOG, LARGE, plan_of

V2 = CATALOG.profile("v2", "large")
COMPUTED = compute_speed(LARGE.architecture, V2).tokens_per_s


@pytest.fixture(autouse=True)
def without_shipped_reports(monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "CHECKOUT", tmp_path / "checkout")


def host_that_measured(tokens_per_s, **changes):
    host = report_of()
    assert host.serving
    measured = {} if tokens_per_s is None else {plan.ONE_STREAM: tokens_per_s}
    serving = replace(host.serving, **{"speed": measured, **changes})
    return with_answers(replace(host, serving=serving))


def write(folder, name, *hosts):
    folder.mkdir(parents=True, exist_ok=True)
    numbered = tuple(replace(item, name=f"host-{place + 1}") for place, item in enumerate(hosts))
    report = Report(1, "2026-11-22T00:00:00Z", "0", numbered)
    (folder / name).write_text(render_report(report))


def test_a_measured_speed_shifts_the_planned_range(tmp_path):
    write(tmp_path, "spark-report-1.json", host_that_measured(COMPUTED * 0.8))
    result = plan.read_calibration(tmp_path, CATALOG)
    assert result.reports == 1
    assert result.factor == pytest.approx(0.8)
    [before], [after] = (
        [next(iter(speed_lines(plan_of(), LARGE, V2, item)))] for item in (Calibration(), result)
    )
    assert "39 to 53 tokens/s for one request" in before
    assert "31 to 43 tokens/s for one request" in after
    assert "not measured on a Spark" in before
    assert "0.80" in after


def test_several_reports_are_combined_by_their_median(tmp_path):
    write(tmp_path, "spark-report-1.json", host_that_measured(COMPUTED * 0.5))
    write(tmp_path / "reports", "any.json", host_that_measured(COMPUTED * 0.9))
    write(tmp_path / "checkout/reports", "one.json", host_that_measured(COMPUTED * 1.1))
    result = plan.read_calibration(tmp_path, CATALOG)
    assert (result.reports, round(result.factor, 6)) == (3, 0.9)
    assert calibrated([]) == Calibration(1.0, 0)


@pytest.mark.parametrize(
    "host",
    [
        host_that_measured(None),
        host_that_measured(1.0, portable=True),
        host_that_measured(1.0, profile="of-somebody"),
        host_that_measured(1.0, model="of-somebody"),
        replace(host_that_measured(1.0), stand_ins=("driver",)),
        replace(host_that_measured(1.0), serving=None),
    ],
)
def test_calibration_ignores_other_hardware_and_unknown_profiles(tmp_path, host):
    write(tmp_path, "spark-report-1.json", host)
    assert plan.read_calibration(tmp_path, CATALOG) == Calibration()


def test_an_invalid_report_is_reported_and_ignored(tmp_path, capsys):
    (tmp_path / "spark-report-1.json").write_text("# nothing\n")
    write(tmp_path, "spark-report-2.json", host_that_measured(COMPUTED))
    assert plan.read_calibration(tmp_path, CATALOG).reports == 1
    assert "spark-report-1.json when computing the speed" in capsys.readouterr().err
