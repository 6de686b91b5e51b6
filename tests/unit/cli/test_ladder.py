"""The ladder serves and measures each stage, and leaves what the settings say behind."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from spark_deploy.checkout import catalog_names
from spark_deploy.cli.changes import ladder, line
from spark_deploy.cli.commands import Options
from spark_deploy.errors import SparkError

OPTIONS = Options(
    command="bench", inventory="x.py", limit=[], exclude=[], data=[], model=None, profile=None,
    yes=True, json=False,
)  # fmt: skip


@pytest.fixture
def story(monkeypatch):
    """What happened, in order; ``red`` holds profiles that do not come to serve."""
    told = SimpleNamespace(steps=[], red=set(), refused=set())

    def listed(options):
        return [SimpleNamespace(name="spark-1", profile=options.profile)]

    def planned(host):
        if host.profile in told.refused:
            raise SparkError.one(host.profile, "does not fit", "choose another")

    def watched(words, hosts, options):
        profile = dict(word.split("=") for word in words if "profile=" in word).get("profile")
        told.steps.append(("serve", profile, *hosts))
        return 3 if profile in told.red else 0

    monkeypatch.setattr(ladder, "listed", listed)
    monkeypatch.setattr(ladder, "planned", planned)
    monkeypatch.setattr(line, "watched", watched)
    return told


def climb(told, **more):
    def measure(host):
        told.steps.append(("measure", host.profile, host.name))
        return host.profile

    return ladder.climb(Options(**{**vars(OPTIONS), **more}), measure)


def test_each_stage_is_served_then_measured_and_the_settings_come_last(story):
    code, results = climb(story)
    assert (code, results) == (0, list(ladder.STAGES))
    expected = [(what, one, "spark-1") for one in ladder.STAGES for what in ("serve", "measure")]
    assert story.steps == [*expected, ("serve", None, "spark-1")]


def test_a_stage_that_does_not_serve_ends_it_and_the_settings_are_served_again(story):
    story.red.add("hybrid")
    code, results = climb(story)
    assert (code, results) == (3, ["base", "base-mtp1"])
    assert story.steps[-2:] == [("serve", "hybrid", "spark-1"), ("serve", None, "spark-1")]


def test_a_stage_that_does_not_fit_is_refused_before_anything_changes(story):
    story.refused.add("v2")
    with pytest.raises(SparkError, match="v2: does not fit"):
        climb(story)
    assert story.steps == []


def test_nothing_changes_before_somebody_agreed(story, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SparkError, match="nobody is there"):
        climb(story, yes=False)
    assert story.steps == []


def test_its_stages_are_profiles_of_the_catalog():
    assert set(ladder.STAGES) <= set(catalog_names("profiles"))
