import json
from dataclasses import replace

import pytest
from spark_contract.builder_api import expand_all
from spark_contract.documents import to_plain
from spark_contract.job import AbsenceProof, ReceiptProof

from spark_deploy.config.errors import PlanError, SettingsError
from spark_deploy.hosts.capacity import disk_demands
from spark_deploy.hosts.disk import DiskUsage
from spark_deploy.lock.resolve import required_names
from spark_deploy.plan.artifacts import reject_unbuildable_checkpoint
from spark_deploy.plan.jobs import discard_jobs, keep_list, plan_jobs
from spark_deploy.plan.peers import Member, with_peers
from spark_deploy.plan.resolve import model_and_profile
from tests.unit.planning.plans import CATALOG, plan_of, problems, settings_of
from tests.unit.preflight.surveyed import survey

DISCARD = {"checkpoint.layout": "full", "checkpoint.keep_base": False}
FULL = {"checkpoint.layout": "full"}
PREBUILT = {"checkpoint.source": "prebuilt", **FULL}
INT4 = {"checkpoint.source": "requantized", "requantize.iters": 0}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint.keep_base": False}, "set checkpoint.layout: full"),
        ({"profile": "v2-native", **DISCARD, "checkpoint.layout": "overlay"},
         "checkpoint.layout: full"),
        ({"profile": "base", "checkpoint.keep_base": False}, "checkpoint.keep_base"),
        ({"profile": "v2-native", "checkpoint.layout": "overlay"}, "checkpoint.layout: full"),
        ({**PREBUILT, "checkpoint.layout": "overlay"}, "set checkpoint.layout: full"),
        ({**PREBUILT, "model": "small"}, "no prebuilt hybrid"),
        ({**PREBUILT, "profile": "v2-native"}, "int8-g128"),
        ({**PREBUILT, "profile": "base"}, "needs keep"),
        ({**INT4, **DISCARD}, "downloaded again"),
    ],
)  # fmt: skip
def test_rejects_checkpoints_that_cannot_be_built(settings, message):
    with pytest.raises(PlanError) as error:
        plan_of(**settings)
    assert message in str(error.value)
    assert [message in str(problem) for problem in problems(**settings)] == [True]


def test_checkpoint_depends_on_the_layout_but_not_on_keep_base():
    overlay, full, discarded = plan_of(), plan_of(**FULL), plan_of(**DISCARD)
    assert overlay.checkpoint.digest != full.checkpoint.digest
    assert discarded.checkpoint.digest == full.checkpoint.digest
    assert discarded.release.name == full.release.name


INT4_DRAFTER = {"engine.drafter": "int4-g128"}


def test_drafter_setting_quantizes_mtp_weights_and_builds_a_separate_checkpoint():
    kept, int4 = plan_of(), plan_of(**INT4_DRAFTER)
    modules = expand_all(int4.checkpoint.build.drafter_int4)
    weights = expand_all(kept.checkpoint.build.mtp_tensors)
    expected = {n.removesuffix(".weight") for n in weights if "_proj" in n and "shared" not in n}
    assert modules == expected
    assert int4.checkpoint.build.digest != kept.checkpoint.build.digest
    assert int4.memory.drafter_bytes < kept.memory.drafter_bytes / 2
    more = int4.checkpoint.output_bytes - kept.checkpoint.output_bytes
    assert more == pytest.approx(int4.memory.drafter_bytes, rel=1e-6)
    full = {**INT4_DRAFTER, **FULL}
    assert plan_of(**full).checkpoint.output_bytes < plan_of(**FULL).checkpoint.output_bytes


def test_drafter_stored_as_int4_in_the_base_is_kept():
    kept, int4 = (plan_of("small", **settings) for settings in ({}, INT4_DRAFTER))
    assert int4.checkpoint.build == kept.checkpoint.build
    assert int4.memory == kept.memory


def test_rejects_int4_drafter_without_16_bit_weights():
    settings = settings_of(**INT4_DRAFTER)
    model, profile = model_and_profile(settings, CATALOG)
    reject_unbuildable_checkpoint(model, profile, settings)
    without = replace(model, tensors=replace(model.tensors, mtp=("mtp.fc.weight",)))
    with pytest.raises(PlanError, match=r"engine\.drafter: keep"):
        reject_unbuildable_checkpoint(without, profile, settings)


@pytest.mark.parametrize(("settings", "kept"), [(FULL, 1), (DISCARD, 0)])
def test_disk_plan_counts_the_discarded_base_only_in_peak_usage(settings, kept):
    plan = plan_of(**settings)
    base = plan.checkpoint.base
    [use] = [use for use in plan.disk if use.path == base.dir]
    assert (use.peak_bytes, use.after_bytes) == (base.size_bytes, kept * base.size_bytes)


def test_discarded_base_is_fetched_only_without_a_checkpoint_and_is_removed_last():
    plan = plan_of(**DISCARD)
    fetch, build, _image = plan_jobs(plan, ())
    [removal] = discard_jobs(plan)
    proof = ReceiptProof(f"{plan.checkpoint.dir}/receipt.json", plan.checkpoint.digest)
    job = {file.path: file.content for file in fetch.files()}[f"{fetch.job.dir}/job.json"]
    assert json.loads(job)["unless"] == to_plain(proof)
    assert build.job.proof == proof
    base = plan.checkpoint.base.dir
    assert removal.job.proof == AbsenceProof(base)
    assert removal.job.argv[-4:] == ("discard", base, "--tree", plan.checkpoint.dir)


def test_keeping_the_base_again_creates_a_new_fetch_job():
    fetch = plan_jobs(plan_of(**FULL), ())[0].job
    assert discard_jobs(plan_of(**FULL)) == ()
    assert fetch.unless is None
    assert fetch.digest != plan_jobs(plan_of(**DISCARD), ())[0].job.digest
    assert fetch.digest == plan_jobs(plan_of(), ())[0].job.digest


@pytest.mark.parametrize(
    ("settings", "present_bytes", "needed_gib"),
    [(DISCARD, 0, 5 + 4), (DISCARD, 3 * GIB, 0), (FULL, 3 * GIB, 5)],
)
def test_needs_disk_only_for_missing_files(settings, present_bytes, needed_gib):
    plan = plan_of(**settings)
    base, tree = plan.checkpoint.base.dir, plan.checkpoint.dir
    needs = replace(plan.preflight, disk_needed_bytes=((base, 5 * GIB), (tree, 4 * GIB)))
    usage = tuple(
        DiskUsage(path, present, "/", "/dev/x", 99 * GIB)
        for path, present in ((base, 0), (tree, present_bytes))
    )
    [demand] = disk_demands(needs, replace(survey(), disk_usage=usage))
    assert demand.needed_bytes == needed_gib * GIB


@pytest.mark.parametrize(("layout", "pieces"), [("overlay", False), ("full", True)])
def test_download_is_hashed_in_chunks_only_for_full_layout(layout, pieces):
    [order] = plan_jobs(plan_of(**{"checkpoint.layout": layout}), ())[0].inputs
    assert json.loads(order.content)["pieces"] is pieces


def repositories(**settings):
    return {repo for repo, _ in required_names(settings_of(**settings), CATALOG).sources}


def test_prebuilt_hybrid_replaces_base_and_keeps_donor():
    assert repositories(**PREBUILT) == {"other/large-hybrid", "org/large-fp8"}
    plan, built = plan_of(**PREBUILT), plan_of(**FULL)
    assert [source.locked.repo for source in plan.sources] == ["other/large-hybrid"]
    assert plan.checkpoint.donor.repo == "org/large-fp8"
    order = plan.checkpoint.build
    same = {"swap", "base_tensors", "mtp_tensors", "donor_unmatched", "head"}
    expected = {name: getattr(built.checkpoint.build, name) for name in same}
    assert {name: getattr(order, name) for name in same} == expected
    assert order.shared_experts == "fp8-base"
    assert plan.memory == built.memory
    assert plan.checkpoint.digest != built.checkpoint.digest
    assert plan.checkpoint.output_bytes > built.checkpoint.output_bytes


def requantize_order(work):
    [order] = [file for file in work.inputs if file.path.endswith("/requantize.json")]
    return json.loads(order.content)


def test_int4_checkpoint_is_made_from_16_bit_repository_in_engine_image():
    assert repositories(**INT4) == {"org/large", "org/large-fp8"}
    plan = plan_of(**INT4)
    image, made, built = plan_jobs(plan, ())
    assert made.job.after == (image.job.digest12,)
    assert built.job.after == (made.job.digest12,)
    order, build = requantize_order(made), plan.checkpoint.build
    assert (order["image"], order["original"]["name"]) == (plan.image.tag, "org/large")
    assert made.job.proof.receipt == f"{order['out']}/receipt.json"
    assert (build.base.dir, build.base.revision) == (order["out"], order["digest"])
    assert tuple(order["base_tensors"]) == build.base_tensors
    assert tuple(order["mtp_tensors"]) == build.mtp_tensors


def test_profile_that_builds_nothing_serves_the_int4_checkpoint():
    plan = plan_of(profile="base", **INT4)
    assert plan.served_checkpoint.dir == plan.release.tree.path == plan.requantized.dir
    assert [work.job.kind for work in plan_jobs(plan, ())] == ["image-pull", "requantize"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"requantize.nsamples": 64}, False),
        ({"images.engine": "vllm/vllm-openai:v0.32.0"}, False),
        ({"profile": "base"}, True),
        ({"downloads.outage_s": 60}, True),
        ({"hub.token": {"env": "TOKEN"}}, True),
    ],
)
def test_int4_folder_name_depends_only_on_build_inputs(change, same):
    assert (plan_of(**INT4, **change).requantized.dir == plan_of(**INT4).requantized.dir) is same


def test_calibration_text_is_sent_with_job_and_changes_the_checkpoint_name(tmp_path):
    folders = set()
    for text in ("one", "two"):
        path = tmp_path / f"{text}.jsonl"
        path.write_text(json.dumps({"text": text}) + "\n")
        plan = plan_of(**{**INT4, "requantize.iters": 1, "requantize.calibration": str(path)})
        made = plan_jobs(plan, ())[1]
        target = requantize_order(made)["calibration"]
        assert [f.content for f in made.inputs if f.path == target] == [path.read_bytes()]
        folders.add(plan.requantized.dir)
    assert len(folders) == 2


def test_peer_copies_int4_checkpoint_without_16_bit_repository():
    jobs = plan_jobs(plan_of(**INT4), ())
    digest = jobs[1].job.proof.digest
    members = [
        Member("a", "http://a", {digest: "complete"}, {digest: "e" * 64}),
        Member("b", "http://b", {digest: "missing"}),
    ]
    assert with_peers(jobs[1], "b", members).job.argv[-2] == "--or-copy"
    assert not [work for work in jobs if work.job.kind == "fetch"]


def test_disk_plan_keeps_the_int4_checkpoint_but_not_its_original():
    plan = plan_of(**INT4)
    path = plan.requantized.dir
    assert dict(plan.preflight.disk_needed_bytes)[path] > plan.requantized.size_bytes
    folders = keep_list(plan).folders
    assert (path in folders, plan.requantized.original.dir in folders) == (True, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "small"}, "no 16-bit repository"),
        ({"requantize.iters": 1}, "requantize.calibration"),
    ],
)
def test_rejects_int4_checkpoint_without_16_bit_repository_or_calibration(settings, message):
    with pytest.raises(PlanError, match=message):
        plan_of(**{**INT4, **settings})


@pytest.mark.parametrize("content", ["", "no json\n", '{"prompt": "x"}\n', '{"text": 3}\n'])
def test_rejects_calibration_file_without_texts(tmp_path, content):
    path = tmp_path / "text.jsonl"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"requantize\.calibration"):
        settings_of(**{"requantize.calibration": str(path)})
