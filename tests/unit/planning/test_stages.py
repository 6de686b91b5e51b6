"""Stages of a ladder: profiles based on others, and drafts and head as settings of a host."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.errors import CatalogError
from tests.unit.planning.plans import FIXTURE, plan_of, problems, shipped_catalog

STAGES = shipped_catalog()
LADDER = ("base", "base-mtp1", "hybrid", "hybrid-mtp1", "hybrid-mtp2", "v2", "v2-tq")


def drafts_of(plan):
    argv = plan.serve.engine.argv
    if "--speculative-config" not in argv:
        return 0
    return json.loads(argv[argv.index("--speculative-config") + 1])["num_speculative_tokens"]


@pytest.mark.parametrize("profile", ["v2", "agent", "base"])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_drafts_are_a_setting_of_the_host_whatever_the_profile_drafts(profile, drafts):
    plan = plan_of(profile=profile, **{"engine.drafts": drafts})
    assert drafts_of(plan) == drafts
    assert bool(plan.memory.drafter_bytes) is bool(drafts)
    assert plan.serve.check.acceptance_floor == (0.5 if drafts else None)


def test_drafts_of_a_host_are_judged_by_the_rails_as_those_of_a_profile():
    [warned] = [text for text in plan_of(profile="agent", **{"engine.drafts": 1}).warnings
                if "drafts-with-prefix-caching" in text]  # fmt: skip
    assert not [text for text in plan_of(profile="agent").warnings if text == warned]
    for drafts, waits, refused in ((0, False, True), (2, False, False), (0, True, False)):
        options = {"attention-backend": "FLASHINFER", "async-scheduling": not waits}
        chosen = {"engine.drafts": drafts, "engine.options": options}
        found = problems(profile="base", **chosen)
        assert any("flashinfer-without-drafts" in one.what for one in found) is refused


def test_the_head_is_a_setting_of_the_host_and_changes_the_tree_where_it_must():
    assert plan_of().checkpoint.order.head == "int8-g128"
    for head in ("keep", "int8-triton"):
        plan = plan_of(**{"engine.head": head})
        assert plan.checkpoint.order.head == "keep"
        told = any('"lm_head":"int8-triton"' in word for word in plan.serve.engine.argv)
        assert told is (head == "int8-triton")
    refused = problems(profile="base", **{"engine.head": "int8-triton"})
    assert any("own-head-without-the-plugin" in one.what for one in refused)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "checkout"))


def written(checkout: Path, name: str, **keys: object) -> None:
    (checkout / f"catalog/profiles/{name}.yml").write_text(yaml.safe_dump(keys))


def test_a_profile_based_on_another_changes_its_keys_and_claims_nothing_of_it(checkout):
    claim = {"what": "w", "result": "r.json", "claim": "c"}
    path = checkout / "catalog/profiles/v2.yml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "proven": [claim]}))
    written(checkout, "one", based_on="v2", summary="s", choose_when="c", speculation=None)
    found = read_catalog(checkout)
    one, two = found.profile("one", "large"), found.profile("v2", "large")
    assert two.proven
    assert two.speculation
    assert (one.proven, one.published, one.speculation) == ((), (), None)
    assert (one.shared_experts, one.limits) == (two.shared_experts, two.limits)


def test_a_profile_is_based_on_one_that_stands_alone_and_says_itself_what_it_is_for(checkout):
    written(checkout, "one", based_on="v2", summary="s", choose_when="c")
    written(checkout, "two", based_on="one", summary="s", choose_when="c")
    written(checkout, "mute", based_on="v2")
    found = read_catalog(checkout)
    with pytest.raises(CatalogError, match="base it on v2 directly"):
        found.profile("two", "large")
    with pytest.raises(CatalogError, match="choose_when"):
        found.profile("mute", "large")


def test_the_ladder_of_a_bench_is_the_published_one_from_its_first_stage_to_its_last():
    places = {
        one.stage: name
        for (name, of), one in STAGES.profiles.items()
        if of == "qwen3.5-122b" and one.stage
    }
    assert tuple(places[place] for place in sorted(places)) == LADDER


def test_each_stage_of_the_published_ladder_differs_from_the_one_before_in_one_thing():
    kinds = [
        (one.shared_experts, one.head, one.speculation and one.speculation.tokens,
         one.kv_cache.dtype) for one in (STAGES.profile(name, "qwen3.5-122b") for name in LADDER)
    ]  # fmt: skip
    assert kinds == [
        ("keep", "keep", None, "auto"),
        ("keep", "keep", 1, "auto"),
        ("fp8-donor", "keep", None, "auto"),
        ("fp8-donor", "keep", 1, "auto"),
        ("fp8-donor", "keep", 2, "auto"),
        ("fp8-donor", "int8-g128", 2, "auto"),
        ("fp8-donor", "int8-g128", 2, "turboquant_k8v4"),
    ]


def test_a_published_speed_names_its_stack_and_that_it_is_not_ours():
    figures = [one for name in STAGES.profile_names
               for one in STAGES.profile(name, "qwen3.5-122b").published
               if one.tokens_per_s]  # fmt: skip
    assert {28.3, 30.8, 36.5, 38.4, 39, 51, 70, 112} <= {one.tokens_per_s for one in figures}
    for one in figures:
        assert one.value == f"{one.tokens_per_s:g} tokens/s"
        assert "vLLM" in one.source
        assert "not measured by this project" in one.source
