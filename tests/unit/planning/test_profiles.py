import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from spark_contract.builder_api import TOKEN_IDS, RankPlan
from spark_contract.documents import parse
from spark_contract.release import Tree

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import CatalogError, SettingsError
from spark_deploy.config.settings.engine import EngineSettings
from spark_deploy.config.settings.host import ClusterSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.jobs import keep_list, plan_jobs
from spark_deploy.plan.peers import Member, shared_trees, with_peers
from spark_deploy.plan.resolve import effective_profile, plan_problems, resolve
from spark_deploy.plan.speed import compute_speed
from tests.unit.planning.plans import CATALOG, FIXTURE, plan_of, problems, shipped_catalog

RESULTS = CHECKOUT / "proofs/results/gpu"
SHIPPED, DEFAULT = shipped_catalog(), Settings()
PROFILES = {name: SHIPPED.profile(name, DEFAULT.model) for name in SHIPPED.profile_names}
PROVEN = [(name, row) for name, profile in PROFILES.items() for row in profile.proven]
SHAPE = SHIPPED.model(DEFAULT.model).architecture


def test_claims_marked_proven_passed_in_the_result_files_of_their_profile():
    assert len(PROVEN) > 20
    for name, row in PROVEN:
        rows = json.loads((RESULTS / row.result).read_text("utf-8"))["rows"]
        passed = [item["passed"] for item in rows if item["claim"] == row.claim]
        assert passed == [True], (name, row.claim)


def test_profiles_without_plugin_build_loadable_checkpoints_and_check_drafts():
    for profile in PROFILES.values():
        assert profile.plugin or not profile.checkpoint_needs_plugin, profile.name
        assert profile.check.acceptance_floor or not profile.speculation, profile.name
    assert PROFILES["v2"].checkpoint_needs_plugin


def test_online_fp8_uses_the_tested_engine_option():
    runs = json.loads((RESULTS / "engine-speculation.json").read_text("utf-8"))["runs"]
    tested = runs["tiny-online-fp8"]["options"]["quantization_config"]
    assert PROFILES["online-fp8"].options["quantization-config"] == tested


def draft_tokens(plan):
    argv = plan.release.engine.argv
    if "--speculative-config" not in argv:
        return 0
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    return int(config["num_speculative_tokens"])


@pytest.mark.parametrize("profile", ["v2", "agent", "base"])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_drafts_setting_overrides_profile(profile, drafts):
    plan = plan_of(profile=profile, **{"engine.drafts": drafts})
    assert draft_tokens(plan) == drafts
    assert bool(plan.memory.drafter_bytes) is bool(drafts)
    assert plan.release.check.acceptance_floor == (0.5 if drafts else None)


def test_guard_rails_check_drafts_in_settings():
    rule = "drafts-with-prefix-caching"
    for drafts, warned in ((1, True), (0, False)):
        warnings = plan_of(profile="agent", **{"engine.drafts": drafts}).warnings
        assert any(rule in text for text in warnings) is warned
    for drafts, asynchronous, refused in ((0, True, True), (2, True, False), (0, False, False)):
        options = {"attention-backend": "FLASHINFER", "async-scheduling": asynchronous}
        refusals = problems(profile="base", **{"engine.drafts": drafts, "engine.options": options})
        assert any("flashinfer-without-drafts" in problem.what for problem in refusals) is refused


def test_lm_head_setting_changes_the_checkpoint_or_only_the_engine():
    assert plan_of().checkpoint.build.head == "int8-g128"
    for head in ("keep", "int8-triton"):
        plan = plan_of(**{"engine.head": head})
        assert plan.checkpoint.build.head == "keep"
        in_engine = any('"lm_head":"int8-triton"' in word for word in plan.release.engine.argv)
        assert in_engine is (head == "int8-triton")
    refusals = problems(profile="base", **{"engine.head": "int8-triton"})
    assert any("own-head-without-the-plugin" in problem.what for problem in refusals)


SAMPLING = {
    "draft_sample_method": "probabilistic",
    "rejection_sample_method": "block",
    "num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 4, 1]],
}


def speculative_config(plan):
    argv = plan.release.engine.argv
    return dict(json.loads(argv[argv.index("--speculative-config") + 1]))


def test_draft_sampling_settings_become_vllm_options_of_the_same_name():
    assert not speculative_config(plan_of()).keys() & SAMPLING.keys()
    settings = {f"engine.{name}": value for name, value in SAMPLING.items()}
    assert SAMPLING.items() <= speculative_config(plan_of(**settings)).items()
    v3 = PROFILES["v3"].speculation
    assert v3 is not None
    assert {name: getattr(v3, name) for name in SAMPLING} == {
        **SAMPLING,
        "num_speculative_tokens_per_batch_size": ((1, 2, 2), (3, 4, 1)),
    }


def test_draft_vocabulary_is_passed_to_the_plugin_and_speeds_up_drafts():
    settings = {"engine.head": "int8-triton", "engine.draft_vocabulary_tokens": 32768}
    for tokens, passed in ((32768, 32768), (0, None)):
        argv = plan_of(**{**settings, "engine.draft_vocabulary_tokens": tokens}).release.engine.argv
        additional = json.loads(argv[argv.index("--additional-config") + 1])
        assert additional["spark"].get("draft_vocabulary") == passed
    v3 = PROFILES["v3"]
    assert v3.speculation is not None
    all_rows = dataclasses.replace(v3.speculation, draft_vocabulary_tokens=0)
    step_s = compute_speed(SHAPE, dataclasses.replace(v3, speculation=all_rows)).step_s
    saved_s = step_s - compute_speed(SHAPE, v3).step_s
    # Two drafts that each read 32,768 of 248,320 rows of 3,072 INT8 values with a scale per 128.
    saved_bytes = 2 * (248_320 - 32_768) * 3072 * (1 + 2 / 128)
    assert saved_s == pytest.approx(saved_bytes / (0.99 * 273e9), rel=0.01)


@pytest.mark.parametrize(
    "changed",
    [
        {"cluster": ClusterSettings(hosts=("a", "b"))},
        {"engine": EngineSettings(head="int8-g128")},
        {"engine": EngineSettings(head="keep")},
    ],
)
def test_profile_drafts_from_all_tokens_where_its_draft_vocabulary_cannot_be_used(changed):
    settings = Settings(profile="v3", **changed)
    assert plan_problems(settings, SHIPPED) == []
    engine = dataclasses.replace(settings.engine, draft_vocabulary_tokens=32768)
    [problem] = plan_problems(dataclasses.replace(settings, engine=engine), SHIPPED)
    assert "guard rail draft-vocabulary" in problem.what


@pytest.mark.parametrize(
    ("engine", "drafts"),
    [({"drafts": 1}, (1, 1)), ({"drafts": 2}, (2, 1)), ({"drafts": 3}, (3, 3)),
     ({"drafts": 3, "num_speculative_tokens_per_batch_size": ((1, 2, 3), (3, 4, 2))}, (3, 2))],
)  # fmt: skip
def test_more_drafts_than_in_the_profile_are_not_limited_by_its_schedule(engine, drafts):
    settings = Settings(profile="v3", engine=EngineSettings(**engine))
    speculation = effective_profile(PROFILES["v3"], settings).speculation
    assert (speculation.draft_tokens(1), speculation.draft_tokens(4)) == drafts


@pytest.mark.parametrize("hosts", [(), ("a", "b")])
def test_larger_cluster_is_suggested_for_a_profile_with_a_draft_vocabulary(hosts):
    cluster = ClusterSettings(hosts=hosts)
    settings = Settings(model="qwen3.5-397b", profile="v3", cluster=cluster)
    [problem] = plan_problems(settings, SHIPPED)
    assert "serve qwen3.5-397b on 4 hosts together" in problem.fix


def ranked_plan(tmp_path, text="three words here", **settings):
    (tmp_path / "answers.txt").write_text(text)
    settings = {"engine.draft_vocabulary_tokens": 32768, **settings}
    path = str(tmp_path / "answers.txt")
    return plan_of(
        **{"engine.head": "int8-triton", "engine.draft_vocabulary_text": path, **settings}
    )


def test_tokens_of_the_draft_vocabulary_text_are_ranked_on_the_host_and_mounted(tmp_path):
    plan = ranked_plan(tmp_path)
    [work] = [work for work in plan_jobs(plan, ()) if work.job.kind == "rank"]
    [built] = [work.job.digest12 for work in plan_jobs(plan, ()) if work.job.kind == "checkpoint"]
    assert work.job.after == (built,)
    text, order = work.inputs
    assert (text.content, text.mode) == (b"three words here", 0o600)
    ranked = parse(RankPlan, order.content.decode())
    assert (ranked.text, ranked.tokens) == (text.path, 32768)
    assert ranked.tokenizer == f"{plan.checkpoint.dir}/tokenizer.json"
    assert ranked.vocabulary == CATALOG.model("large").architecture.vocabulary
    assert Tree(ranked.out, ranked.digest) in plan.release.companions
    [mount] = [mount for mount in plan.release.engine.mounts if mount.source == ranked.out]
    assert mount.read_only
    argv = plan.release.engine.argv
    spark = json.loads(argv[argv.index("--additional-config") + 1])["spark"]
    assert spark["draft_vocabulary_file"] == f"{mount.target}/{TOKEN_IDS}"
    assert ranked.out in keep_list(plan).folders
    members = [Member(name, f"http://{name}", {ranked.digest: "complete"}) for name in "ab"]
    assert with_peers(work, "a", members) == work
    assert ranked.digest not in {tree.digest for tree in shared_trees([work])}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"engine.max_sequences": 2}, True),
        ({"text": "other words"}, False),
        ({"engine.draft_vocabulary_tokens": 16384}, False),
    ],
)
def test_folder_of_ranked_tokens_depends_only_on_inputs(tmp_path, change, same):
    first, second = ranked_plan(tmp_path), ranked_plan(tmp_path, **change)
    assert (first.vocabulary.order == second.vocabulary.order) is same
    assert (first.release.name == second.release.name) is (not change)
    assert first.checkpoint == second.checkpoint


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"profile": "v2"}, {"draft_vocabulary_text"}),
        ({"cluster": ClusterSettings(hosts=("a", "b"))}, {"draft_vocabulary_text"}),
        ({"head": "int8-g128"}, {"draft_vocabulary_text"}),
        ({"draft_vocabulary_tokens": 0}, {"draft_vocabulary_text"}),
        ({"drafts": 0}, {"draft_vocabulary_text", "draft_sample_method", "drafter"}),
        ({"profile": "base"}, {"draft_vocabulary_text", "draft_sample_method", "drafter"}),
        ({}, set()),
    ],
)
def test_draft_settings_without_effect_cause_a_warning_that_names_them(changed, named):
    of_settings = {key: changed[key] for key in ("profile", "cluster") if key in changed}
    engine = {key: value for key, value in changed.items() if key not in of_settings}
    draft_settings = {
        "draft_vocabulary_text": "three words",
        "draft_sample_method": "greedy",
        "drafter": "int4-g128",
    }
    settings = Settings(
        engine=EngineSettings(**draft_settings, **engine), **{"profile": "v3", **of_settings}
    )
    warnings = "".join(resolve(settings, SHIPPED).warnings)
    assert {name for name in draft_settings if f"engine.{name}" in warnings} == named
    assert ("draft-settings-without-effect" in warnings) is bool(named)


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"x" * ((64 << 20) + 1), "1 TiB"])
def test_rejects_unreadable_empty_or_too_large_draft_vocabulary_texts(tmp_path, content):
    path = tmp_path / "answers.txt"
    if content == "1 TiB":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"engine\.draft_vocabulary_text"):
        plan_of(**{"engine.draft_vocabulary_text": str(path)})


@pytest.mark.parametrize("schedule", [[[2, 4, 1]], [[1, 2, 2], [2, 3, 1]], [[1, 3, 2], [5, 4, 1]]])
def test_rejects_draft_schedules_that_the_engine_rejects(schedule):
    with pytest.raises(SettingsError) as error:
        plan_of(**{"engine.num_speculative_tokens_per_batch_size": schedule})
    assert "engine.num_speculative_tokens_per_batch_size" in str(error.value)


@pytest.fixture
def checkout(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "checkout"))


def write_profile(checkout, name, **keys):
    (checkout / f"catalog/profiles/{name}.yml").write_text(yaml.safe_dump(keys))


def test_profile_based_on_another_does_not_inherit_its_claims(checkout):
    claim = {"what": "w", "result": "r.json", "claim": "c"}
    v2 = yaml.safe_load((checkout / "catalog/profiles/v2.yml").read_text())
    write_profile(checkout, "v2", **{**v2, "proven": [claim]})
    write_profile(checkout, "own", based_on="v2", summary="s", choose_when="c", speculation=None)
    catalog = read_catalog(checkout)
    own, base = catalog.profile("own", "large"), catalog.profile("v2", "large")
    assert base.proven
    assert base.speculation
    assert (own.proven, own.published, own.speculation) == ((), (), None)
    assert (own.shared_experts, own.limits) == (base.shared_experts, base.limits)


def test_profile_with_based_on_requires_a_complete_base_and_a_new_description(checkout):
    write_profile(checkout, "one", based_on="v2", summary="s", choose_when="c")
    write_profile(checkout, "two", based_on="one", summary="s", choose_when="c")
    write_profile(checkout, "bare", based_on="v2")
    catalog = read_catalog(checkout)
    with pytest.raises(CatalogError, match="base it on v2 directly"):
        catalog.profile("two", "large")
    with pytest.raises(CatalogError, match="choose_when"):
        catalog.profile("bare", "large")


def test_published_speeds_name_their_source():
    figures = [figure for name in SHIPPED.profile_names
               for figure in SHIPPED.profile(name, "qwen3.5-122b").published
               if figure.tokens_per_s]  # fmt: skip
    speeds = {figure.tokens_per_s for figure in figures}
    assert {28.3, 30.8, 36.5, 38.4, 39, 51, 70, 112} <= speeds
    for figure in figures:
        assert figure.value == f"{figure.tokens_per_s:g} tokens/s"
        assert "vLLM" in figure.source
        assert "not measured by this project" in figure.source
