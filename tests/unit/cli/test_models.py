import json
import re
from dataclasses import replace

from spark_deploy.cli import main
from spark_deploy.cli.models import settings_for_hosts
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.settings.engine import EngineSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.plan.memory import missing_bytes
from spark_deploy.plan.resolve import plan_problems
from tests.unit.cli.targets import write_inventory


def listed(capsys, *words):
    assert main(["models", "--json", *words]) == 0
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)}


def test_models_lists_catalog_models_except_lab_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    models, catalog = listed(capsys), read_catalog()
    assert models.keys() == {name for name in catalog.models if not name.startswith("lab-")}
    assert listed(capsys, "--all").keys() == set(catalog.models)
    large = models["qwen3.5-397b"]["profiles"]
    assert (large["1"], large["2"], large["4"][0]) == ([], [], "v2")
    model = catalog.model("qwen3.5-397b")
    settings = Settings(model="qwen3.5-397b")
    assert missing_bytes(model, catalog.profile("v2", "qwen3.5-397b"), settings) > 0
    plain = models["qwen3-4b"]
    assert (plain["is_known"], plain["context_tokens"], plain["download_bytes"]) == (
        False, None, None,
    )  # fmt: skip


def test_suggested_fix_makes_the_model_fit_on_the_available_hosts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fix = listed(capsys)["qwen3.5-397b"]["fixes"]["2"]
    fraction, drafts = re.findall(
        r"memory_fraction to ([\d.]+) and set engine.drafts to (\d)", fix
    )[0]
    assert "4 hosts" in fix
    for fits, share in ((True, float(fraction)), (False, 0.8)):
        engine = EngineSettings(memory_fraction=share, drafts=int(drafts))
        settings = replace(settings_for_hosts(2, "qwen3.5-397b", "v2"), engine=engine)
        assert (not plan_problems(settings, read_catalog())) is fits


def test_models_command_lists_models_matching_a_word_and_rejects_a_typo(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert set(listed(capsys, "qwen3", "small")) == {"qwen3-30b-a3b", "qwen3-4b"}
    assert set(listed(capsys, "embed")) == {"jina-embeddings-v5-small"}
    assert set(listed(capsys, "qwen3.8-flash-next")) == {"qwen3.8-flash-next"}  # a prefix of others
    assert main(["models", "qwen3.5-122c"]) == 1
    assert "qwen3.5-122b" in capsys.readouterr().err


def test_an_invalid_model_file_is_reported_instead_of_hidden(tmp_path, monkeypatch, capsys):
    write_inventory(tmp_path / "inventory/spark.py", "a")
    for kind in ("models", "profiles"):
        (tmp_path / f"catalog/{kind}").mkdir(parents=True)
        (tmp_path / f"catalog/{kind}/mine-{kind}.yml").write_text("sumary: x\n")
    monkeypatch.chdir(tmp_path)
    assert "qwen3.5-122b" in listed(capsys)
    assert main(["models"]) == 0
    assert "catalog/models/mine-models.yml: sumary: unknown key" in capsys.readouterr().err
    for words in (["models", "mine-models"], ["use", "mine-models"], ["use", "mine-models/v2"]):
        assert main(words) == 1
        assert "catalog/models/mine-models.yml: sumary: unknown key" in capsys.readouterr().err
    assert main(["use", "mine-profiles"]) == 1
    assert "catalog/profiles/mine-profiles.yml: sumary: unknown key" in capsys.readouterr().err


def test_only_profiles_marked_for_comparison_are_left_out_of_the_choices(
    tmp_path, monkeypatch, capsys
):
    write_inventory(tmp_path / "inventory/spark.py", "a")
    (tmp_path / "catalog/profiles").mkdir(parents=True)
    (tmp_path / "catalog/profiles/mine.yml").write_text(
        "based_on: base\nsummary: Mine\nchoose_when: you compare texts in two languages\n"
    )
    monkeypatch.chdir(tmp_path)
    choices = listed(capsys, "qwen3.5-122b")["qwen3.5-122b"]["choices"]
    assert {"mine", "base", "v2", "v2-tq"} <= choices.keys()
    assert not {"base-mtp1", "hybrid", "hybrid-mtp1", "hybrid-mtp2"} & choices.keys()
