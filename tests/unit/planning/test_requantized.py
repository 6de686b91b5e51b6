"""An INT4 tree of our own: asked for by a setting, made by a job, a base like a fetched one."""

import json

import pytest

from spark_deploy.cli.plan_text import plan_text
from spark_deploy.config.errors import PlanError, SettingsError
from spark_deploy.lock.resolve import wanted_by
from spark_deploy.plan.jobs import Member, jobs_of, keep_of, with_peers
from spark_deploy.plan.resolve import pair_of
from tests.unit.planning.plans import CATALOG, plan_of, settings_of

ORIGINAL = "org/large"
OWN = {"checkpoint.requantized": True, "requantize.iters": 0}


def order_of(work):
    [order] = [file for file in work.inputs if file.path.endswith("/requantize.json")]
    return json.loads(order.content)


def test_the_16_bit_repository_is_locked_and_the_published_int4_tree_is_not():
    assert {repo for repo, _ in wanted_by(settings_of(**OWN), CATALOG).sources} == {
        ORIGINAL,
        "org/large-fp8",
    }


def test_the_tree_is_made_in_the_engine_s_image_and_the_hybrid_on_top_of_it():
    plan = plan_of(**OWN)
    image, made, built = jobs_of(plan, ())
    assert made.job.after == (image.job.digest12,)
    assert built.job.after == (made.job.digest12,)
    order = order_of(made)
    assert order["image"] == plan.image.tag
    assert order["original"]["name"] == ORIGINAL
    assert made.job.proof.receipt == f"{order['out']}/receipt.json"
    base = plan.checkpoint.order.base
    assert (base.dir, base.revision) == (order["out"], order["digest"])
    # What is packed is what the model's exact sets say, and the builder demands of a base.
    assert tuple(order["base_tensors"]) == plan.checkpoint.order.base_tensors
    assert tuple(order["mtp_tensors"]) == plan.checkpoint.order.mtp_tensors


def test_a_profile_that_builds_nothing_serves_the_tree_itself():
    plan = plan_of(profile="base", **OWN)
    assert plan.tree.dir == plan.requantized.dir
    assert [work.job.kind for work in jobs_of(plan, ())] == ["image-pull", "requantize"]
    assert plan.serve.tree.path == plan.requantized.dir


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"requantize.nsamples": 64}, False),
        ({"images.engine": "vllm/vllm-openai:v0.32.0"}, False),
        ({"profile": "base"}, True),
        ({"downloads.tries": 3}, True),
        ({"hub.token": {"env": "TOKEN"}}, True),
    ],
)
def test_the_tree_is_named_by_all_that_it_is_made_of_and_by_nothing_else(change, same):
    assert (plan_of(**OWN, **change).requantized.dir == plan_of(**OWN).requantized.dir) is same


def test_the_text_it_is_tuned_with_travels_with_the_job_and_names_the_tree(tmp_path):
    trees = set()
    for told in ("one", "two"):
        path = tmp_path / f"{told}.jsonl"
        path.write_text(json.dumps({"text": told}) + "\n")
        plan = plan_of(**{**OWN, "requantize.iters": 1, "requantize.calibration": str(path)})
        made = jobs_of(plan, ())[1]
        [sent] = [file for file in made.inputs if file.path == order_of(made)["calibration"]]
        assert sent.content == path.read_bytes()
        trees.add(plan.requantized.dir)
    assert len(trees) == 2


def test_a_host_with_the_tree_lends_it_and_the_other_needs_nothing_of_the_original():
    made = jobs_of(plan_of(**OWN), ())[1]
    digest = made.job.proof.digest
    members = [
        Member("a", "http://a", {digest: "there"}, {digest: "e" * 64}),
        Member("b", "http://b", {digest: "missing"}),
    ]
    lent = with_peers(made, "b", members)
    assert lent.job.argv[-2] == "--or-copy"
    assert not [work for work in jobs_of(plan_of(**OWN), ()) if work.job.kind == "fetch"]


def test_disk_is_counted_and_the_original_is_free_to_go_afterwards():
    plan = plan_of(**OWN)
    needed = dict(plan.needs.disk_needed_bytes)
    assert needed[plan.requantized.dir] > plan.requantized.size_bytes
    assert plan.requantized.dir in {use.path for use in plan.disk}
    kept = keep_of(plan).folders
    assert plan.requantized.dir in kept
    assert plan.requantized.original.dir not in kept


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"model": "small"}, "no 16-bit repository"),
        ({"checkpoint.prebuilt": True, "checkpoint.layout": "full"}, "no prebuilt|two bases"),
        ({"checkpoint.keep_base": False, "checkpoint.layout": "full"}, "downloaded again"),
        ({"requantize.iters": 1}, "requantize.calibration"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_reason(choices, said):
    with pytest.raises(PlanError, match=said):
        plan_of(**{**OWN, **choices})


def test_the_plan_says_what_is_quantised_with_how_much_memory_and_by_which_command():
    settings = settings_of(**OWN)
    said = "\n".join(plan_text(plan_of(**OWN), *pair_of(settings, CATALOG), verbose=True))
    assert f"in {plan_of(**OWN).requantized.dir}: AutoRound, 0 steps" in said
    assert "`spark-deploy add --requantize`" in said


@pytest.mark.parametrize("content", ["", "no json\n", '{"prompt": "x"}\n', '{"text": 3}\n'])
def test_a_file_without_texts_is_refused_where_it_is_named(tmp_path, content):
    path = tmp_path / "text.jsonl"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"requantize\.calibration"):
        settings_of(**{"requantize.calibration": str(path)})
