"""The ladder serves and measures each stage, and leaves what the settings say behind."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spark_deploy.cli import bench, changes
from spark_deploy.cli.options import Options
from spark_deploy.config.errors import SparkError
from tests.unit.planning.plans import shipped_catalog

OPTIONS = Options(inventory="x.py", yes=True, json=True)


STAGES = ["plain", "drafts", "all"]
PROFILES = {
    ("all", "mine"): 3, ("plain", "mine"): 1, ("drafts", "mine"): 2,
    ("beside", "mine"): None, ("plain", "another"): 1,
}  # fmt: skip


def host_of(model, **more):
    """A host whose catalog has three stages of one model, and other profiles."""
    return SimpleNamespace(
        name="spark-1",
        settings=SimpleNamespace(settings=SimpleNamespace(model=model)),
        catalog=SimpleNamespace(
            profiles={pair: SimpleNamespace(stage=stage) for pair, stage in PROFILES.items()}
        ),
        **more,
    )


@pytest.fixture
def story(monkeypatch):
    """What happened, in order; ``red`` holds profiles that do not come to serve."""
    told = SimpleNamespace(steps=[], red=set(), refused=set())

    def listed(options):
        return [host_of("mine", profile=options.profile)]

    def planned(host):
        if host.profile in told.refused:
            raise SparkError.one(host.profile, "does not fit", "choose another")

    def deploy(command, hosts, options):
        assert options.json, "else its screen would stand among the results"
        told.steps.append(("serve", options.profile, *(host.name for host in hosts)))
        return 3 if options.profile in told.red else 0

    monkeypatch.setattr(bench, "select_hosts", listed)
    monkeypatch.setattr(bench, "build_plan", planned)
    monkeypatch.setattr(changes, "deploy", deploy)
    return told


def climb(told, **more):
    def measure(host):
        told.steps.append(("measure", host.profile, host.name))
        return host.profile

    return bench.climb(replace(OPTIONS, **more), measure)


def test_each_stage_is_served_then_measured_and_the_settings_come_last(story):
    code, results = climb(story)
    assert (code, results) == (0, STAGES)
    expected = [(what, one, "spark-1") for one in STAGES for what in ("serve", "measure")]
    assert story.steps == [*expected, ("serve", None, "spark-1")]


def test_a_stage_that_does_not_serve_ends_it_and_the_settings_are_served_again(story):
    story.red.add("all")
    code, results = climb(story)
    assert (code, results) == (3, ["plain", "drafts"])
    assert story.steps[-2:] == [("serve", "all", "spark-1"), ("serve", None, "spark-1")]


def test_a_stage_that_does_not_fit_is_refused_before_anything_changes(story):
    story.refused.add("all")
    with pytest.raises(SparkError, match="all: does not fit"):
        climb(story)
    assert story.steps == []


def test_nothing_changes_before_somebody_agreed(story, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SparkError, match="needs a terminal"):
        climb(story, yes=False)
    assert story.steps == []


def test_a_model_without_stages_is_refused():
    with pytest.raises(SparkError, match="no profile is a stage of third"):
        bench.stages_of(host_of("third"))


def test_stages_of_one_model_have_places_of_their_own():
    shipped = shipped_catalog()
    places = [(of, one.stage) for (_, of), one in shipped.profiles.items() if one.stage]
    assert len(places) == len(set(places)) > 5
