import shutil

import pytest

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import CatalogError, PlanError
from spark_deploy.config.settings.load import load_hosts
from tests.chat_templates import QWEN
from tests.unit.planning.plans import plan_with, shipped_catalog

OWN = "{{ messages }}"
CHOSEN = {
    "selected by the profile": ("qwen3.5-122b", "agent", {}, QWEN),
    "not selected by the profile": ("qwen3.5-122b", "v2", {}, None),
    "selected by the owner": ("qwen3.5-35b", "v2", {"engine.template_fixes": True}, QWEN),
    "switched off": ("qwen3.5-122b", "agent", {"engine.template_fixes": False}, None),
    "the owner's file": ("qwen3.5-122b", "agent", {"engine.chat_template": "own.jinja"}, OWN),
    "a model without fixes": ("lab-tiny", "agent", {}, None),
}


def chosen_template(plan):
    argv = plan.release.engine.argv
    return argv[argv.index("--chat-template") + 1] if "--chat-template" in argv else None


def plan_of(root, model, profile, **settings):
    (root / "own.jinja").write_text(OWN)
    overrides = {"model": model, "profile": profile, **settings}
    hosts = load_hosts({"spark": ["a"]}, root=root, overrides=overrides)
    return plan_with(hosts["a"].settings, shipped_catalog())


@pytest.mark.parametrize("case", CHOSEN)
def test_profile_and_settings_choose_the_template(tmp_path, case):
    model, profile, settings, expected = CHOSEN[case]
    assert chosen_template(plan_of(tmp_path, model, profile, **settings)) == expected


def test_service_has_its_own_choice(tmp_path):
    service = {
        "model": "qwen3.5-35b", "profile": "agent", "names": ["small"],
        "port": 8001, "memory_gib": 45,
        "engine": {"max_context_tokens": 16384, "template_fixes": False},
    }  # fmt: skip
    settings = {"services": {"small": service}, "engine.max_context_tokens": 16384}
    plan = plan_of(tmp_path, "qwen3.5-35b", "agent", **settings)
    assert [chosen_template(served) for served in plan.served] == [QWEN, None]


@pytest.mark.parametrize(("model", "profile"), [("qwen3-4b", "plain"), ("lab-tiny", "v2")])
def test_refuses_fixes_for_a_model_without_them(tmp_path, model, profile):
    with pytest.raises(PlanError) as refused:
        plan_of(tmp_path, model, profile, **{"engine.template_fixes": True})
    [problem] = refused.value.problems
    assert problem.where == "engine.template_fixes"
    assert problem.what == f"{model} has no fixed chat template"
    assert "engine.chat_template" in problem.fix


def test_only_models_with_the_original_template_have_fixes():
    models = shipped_catalog().models.values()
    fixed = {model.name: model.fixed_template for model in models if model.fixed_template}
    assert fixed == dict.fromkeys(["qwen3.5-122b", "qwen3.5-35b", "qwen3.5-397b"], "qwen3.5")


def test_unknown_template_name_is_rejected(tmp_path):
    folder = tmp_path / "catalog/models"
    folder.mkdir(parents=True)
    shutil.copy(CHECKOUT / "catalog/models/qwen3-4b.yml", folder / "mine.yml")
    with (folder / "mine.yml").open("a") as file:
        file.write("\nfixed_template: qwen9\n")
    with pytest.raises(CatalogError) as refused:
        read_catalog(user_dir=tmp_path).model("mine")
    [problem] = refused.value.problems
    assert problem.where == "catalog/models/mine.yml: fixed_template"
    assert problem.what == "catalog/templates/qwen9.jinja does not exist"
    assert problem.fix == "known here: qwen3.5"
