"""A base that is not kept: who may ask for it, what it costs, what is fetched afterwards."""

import json
from dataclasses import replace

import pytest
from spark_contract.documents import plain
from spark_contract.job import AbsentProof, ReceiptProof

from spark_deploy.cli.plan_text import plan_lines
from spark_deploy.config.errors import PlanError
from spark_deploy.hosts.capacity import demands
from spark_deploy.hosts.disk import Place
from spark_deploy.lock.resolve import size
from spark_deploy.plan.jobs import discard_jobs_of, jobs_of
from spark_deploy.plan.resolve import pair_of
from tests.unit.planning.plans import CATALOG, plan_of, problems, settings_of
from tests.unit.preflight.surveyed import survey

LET_GO = {"checkpoint.layout": "full", "checkpoint.keep_base": False}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("profile", "choices", "said"),
    [
        ("v2", {"checkpoint.keep_base": False}, "set checkpoint.layout: full"),
        ("v2-native", {**LET_GO, "checkpoint.layout": "overlay"}, "checkpoint.layout: full"),
        ("base", {"checkpoint.keep_base": False}, "checkpoint.keep_base"),
        ("v2-native", {"checkpoint.layout": "overlay"}, "checkpoint.layout: full"),
    ],
)
def test_a_tree_that_needs_its_base_refuses_to_let_it_go(profile, choices, said):
    with pytest.raises(PlanError, match="fix: ") as refused:
        plan_of("large", profile, **choices)
    assert said in str(refused.value)
    before_any_lock = problems("large", profile, **choices)
    assert [said in str(problem) for problem in before_any_lock] == [True]


def test_the_layout_of_the_settings_is_another_tree_and_keeping_the_base_is_not():
    overlay, full = plan_of(), plan_of(**{"checkpoint.layout": "full"})
    without = plan_of(**LET_GO)
    assert overlay.checkpoint.digest != full.checkpoint.digest
    assert without.checkpoint.digest == full.checkpoint.digest
    assert without.serve.name == full.serve.name


def test_the_disk_plan_counts_the_base_on_the_way_and_not_afterwards():
    kept = plan_of(**{"checkpoint.layout": "full"})
    for plan, share in ((kept, 1), (plan_of(**LET_GO), 0)):
        base = plan.checkpoint.base
        use = next(use for use in plan.disk if use.path == base.dir)
        assert (use.peak_bytes, use.after_bytes) == (base.size_bytes, share * base.size_bytes)


def test_the_plan_says_what_a_rebuild_would_fetch():
    plan = plan_of(**LET_GO)
    text = "\n".join(plan_lines(plan, *pair_of(settings_of(**LET_GO), CATALOG)))
    base = size(plan.checkpoint.base.size_bytes)
    assert f"a rebuild downloads {base} and 453.0 MB of donor ranges again" in text
    assert f"0 B, {base} at peak for org/large-int4" in text
    assert "a rebuild downloads" not in "\n".join(
        plan_lines(plan_of(), *pair_of(settings_of(), CATALOG))
    )


def test_the_base_is_fetched_only_while_the_tree_is_missing_and_removed_last():
    plan = plan_of(**LET_GO)
    fetch, build, _image = jobs_of(plan, ())
    (removal,) = discard_jobs_of(plan)
    tree = ReceiptProof(f"{plan.checkpoint.dir}/receipt.json", plan.checkpoint.digest)
    described = {file.path: file.content for file in fetch.files()}[f"{fetch.job.dir}/job.json"]
    assert json.loads(described)["unless"] == plain(tree)
    assert build.job.proof == tree
    assert removal.job.proof == AbsentProof(plan.checkpoint.base.dir)
    assert removal.job.argv[-4:] == (
        "discard",
        plan.checkpoint.base.dir,
        "--tree",
        plan.checkpoint.dir,
    )


def test_a_base_that_is_kept_again_is_another_job_so_that_it_is_fetched():
    kept = plan_of(**{"checkpoint.layout": "full"})
    fetch = jobs_of(kept, ())[0].job
    assert discard_jobs_of(kept) == ()
    assert fetch.unless is None
    assert fetch.digest != jobs_of(plan_of(**LET_GO), ())[0].job.digest
    assert fetch.digest == jobs_of(plan_of(), ())[0].job.digest


@pytest.mark.parametrize(
    ("choices", "tree_bytes", "wanted_gib"),
    [
        (LET_GO, 0, 5 + 4),  # nothing there: base and tree
        (LET_GO, 3 * GIB, 0),  # the tree alone is everything, smaller than planned or not
        ({"checkpoint.layout": "full"}, 3 * GIB, 5),  # the base is to be kept: it comes again
    ],
)
def test_room_is_asked_only_for_what_will_be_written(choices, tree_bytes, wanted_gib):
    plan = plan_of(**choices)
    base, tree = plan.checkpoint.base.dir, plan.checkpoint.dir
    needs = replace(plan.needs, disk_needed_bytes=((base, 5 * GIB), (tree, 4 * GIB)))
    places = tuple(
        Place(path, present, "/", "/dev/x", 99 * GIB)
        for path, present in ((base, 0), (tree, tree_bytes))
    )
    (found,) = demands(needs, replace(survey(), places=places))
    assert found.needed_bytes == wanted_gib * GIB


@pytest.mark.parametrize(("layout", "wanted"), [("overlay", False), ("full", True)])
def test_a_download_is_hashed_by_pieces_only_for_a_layout_that_copies_them(layout, wanted):
    plan = plan_of(**{"checkpoint.layout": layout})
    (order,) = jobs_of(plan, ())[0].inputs
    assert json.loads(order.content)["pieces"] is wanted
