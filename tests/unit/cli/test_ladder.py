import io
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spark_deploy.cli import bench, changes
from spark_deploy.cli.console import Options
from spark_deploy.config.errors import SparkError

OPTIONS = Options(inventory="x.py", yes=True, json=True)
STAGES = ["plain", "drafts", "all"]
PROFILES = {
    ("all", "mine"): 3, ("plain", "mine"): 1, ("drafts", "mine"): 2,
    ("other", "mine"): None, ("plain", "another"): 1,
}  # fmt: skip


def host_of(model, **fields):
    profiles = {pair: SimpleNamespace(stage=stage) for pair, stage in PROFILES.items()}
    settings = SimpleNamespace(model=model)
    catalog = SimpleNamespace(profiles=profiles)
    return SimpleNamespace(name="spark-1", settings=settings, catalog=catalog, **fields)


@pytest.fixture
def ladder(monkeypatch):
    """Fake hosts: ``steps`` records the order; ``failing`` and ``too_large`` list profiles."""
    state = SimpleNamespace(steps=[], failing=set(), too_large=set())

    def build_plan(host):
        if host.profile in state.too_large:
            raise SparkError.single(host.profile, "does not fit", "choose another")

    def deploy(command, hosts, options):
        assert options.json
        state.steps.append(("serve", options.profile, *(host.name for host in hosts)))
        return 3 if options.profile in state.failing else 0

    def measure(host):
        state.steps.append(("measure", host.profile, host.name))
        return host.profile

    monkeypatch.setattr(
        bench, "select_hosts", lambda options: [host_of("mine", profile=options.profile)]
    )
    monkeypatch.setattr(bench, "build_plan", build_plan)
    monkeypatch.setattr(changes, "deploy", deploy)
    state.run = lambda **options: bench.run_ladder(replace(OPTIONS, **options), measure)
    return state


def test_ladder_serves_and_measures_each_stage_before_deploying_the_settings(ladder):
    assert ladder.run() == (0, STAGES)
    expected = [(step, stage, "spark-1") for stage in STAGES for step in ("serve", "measure")]
    assert ladder.steps == [*expected, ("serve", None, "spark-1")]


def test_failed_stage_ends_the_ladder_and_restores_the_settings(ladder):
    ladder.failing.add("all")
    assert ladder.run() == (3, ["plain", "drafts"])
    assert ladder.steps[-2:] == [("serve", "all", "spark-1"), ("serve", None, "spark-1")]


def test_ladder_changes_nothing_if_a_stage_does_not_fit(ladder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SparkError, match="requires a terminal"):
        ladder.run(yes=False)
    ladder.too_large.add("all")
    with pytest.raises(SparkError, match="all: does not fit"):
        ladder.run()
    assert ladder.steps == []


def test_ladder_rejects_a_model_without_stages():
    with pytest.raises(SparkError, match="third has no profile with a stage"):
        bench.list_stages(host_of("third"))
