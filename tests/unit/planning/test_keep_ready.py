"""Pairs to have ready: planned, counted and kept like what is served, and never in its way."""

from __future__ import annotations

from typing import Any

import pytest

from spark_deploy.lock.resolve import wanted_by
from spark_deploy.plan.jobs import jobs_of, keep_of, ready_jobs_of
from spark_deploy.plan.types import HostPlan
from tests.unit.planning.plans import CATALOG, plan_of, problems, settings_of

BASE = {"model": "large", "profile": "base"}
TQ = {"model": "large", "profile": "v2-tq"}
OTHER = {"model": "small", "profile": "v2"}


def planned(*ready: dict[str, str], **more: Any) -> HostPlan:
    return plan_of("large", "v2", keep_ready=list(ready), **more)


def kinds(jobs: Any) -> list[str]:
    return sorted(work.job.kind for work in jobs)


def test_another_model_brings_its_own_downloads_and_tree():
    plan = planned(OTHER)
    assert kinds(ready_jobs_of(plan, ())) == ["checkpoint", "fetch"]  # the image is shared


def test_what_pairs_share_is_prepared_and_counted_once():
    alone, ready = planned(), planned(TQ)
    assert ready_jobs_of(ready, ()) == ()
    more = [use.what for use in ready.disk if use not in alone.disk]
    assert more in ([], ["compile cache"])


def test_the_pair_that_is_served_is_not_ready_beside_itself():
    plan = planned({"model": "large", "profile": "v2"}, BASE)
    assert [(pair.model, pair.profile) for pair in plan.ready] == [("large", "base")]


def test_having_others_ready_changes_nothing_of_what_is_served():
    alone, ready = planned(), planned(BASE, OTHER)
    assert ready.serve == alone.serve
    assert jobs_of(ready, ()) == jobs_of(alone, ())


def test_a_switch_to_a_ready_pair_needs_no_further_work():
    before = planned(OTHER, BASE)
    done = {work.job.digest for work in (*jobs_of(before, ()), *ready_jobs_of(before, ()))}
    for pair in (OTHER, BASE):
        after = plan_of(pair["model"], pair["profile"])
        assert {work.job.digest for work in jobs_of(after, ())} <= done


def test_disk_and_images_of_ready_pairs_are_asked_for():
    alone, ready = planned(), planned(BASE, OTHER)
    needed = [sum(size for _, size in plan.needs.disk_needed_bytes) for plan in (alone, ready)]
    more = plan_of("small", "v2")
    assert needed[1] - needed[0] > sum(source.size_bytes for source in more.sources)
    assert set(ready.needs.images) > set(alone.needs.images)
    docker = dict(ready.needs.disk_needed_bytes)[ready.needs.docker_dir]
    assert docker == sum(size for _, size in ready.needs.image_bytes)


def test_names_of_ready_pairs_are_locked_too():
    found = wanted_by(settings_of(keep_ready=[OTHER]), CATALOG)
    assert any("small" in repo for repo, _ in found.sources)


def test_a_ready_pair_that_can_never_be_served_is_refused_by_its_name():
    found = problems(keep_ready=[{"model": "huge", "profile": "v2"}])
    assert found
    assert all("keep_ready huge with v2" in problem.where for problem in found)


@pytest.mark.parametrize("pair", [BASE, OTHER, TQ])
def test_pruning_keeps_everything_a_switch_would_need(pair):
    keep = keep_of(planned(pair))
    for plan in (planned(), plan_of(pair["model"], pair["profile"])):
        assert {plan.serve.tree.path, *(source.dir for source in plan.sources)} <= keep.folders
        assert {plan.image.tag, plan.image.base} <= keep.images
        mounts = {mount.source for mount in plan.serve.engine.mounts}
        assert mounts <= keep.folders


def test_pruning_keeps_the_planned_release_and_as_many_ways_back_as_were_said():
    plan = planned(**{"releases.keep": 4})
    keep = keep_of(plan)
    assert (keep.releases, keep.releases_kept) == ({plan.serve.name}, 4)
