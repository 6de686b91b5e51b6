from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_deploy.cli.recipes import draft_from_recipe
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.checkout import CHECKOUT, read_mapping
from spark_deploy.config.errors import CatalogError
from tests.unit.hostile import YAML
from tests.unit.planning.plans import shipped_catalog

FIXTURES = CHECKOUT / "tests/fixtures/recipes"
READ = {
    path.name: read_mapping(path, label=path.name, is_foreign=True)[0]
    for path in sorted(FIXTURES.glob("*.yaml"))
}
CHANGED: dict[str, dict[str, Any]] = {
    "sparkrun-2.yaml": {
        "limits": {"max_context_tokens": 65536, "memory_fraction": 0.7},
        "kv_cache": {"dtype": "fp8"},
        "speculation": {"method": "mtp", "tokens": 3},
        "options": {"attention-backend": "flashinfer"},
        "environment": {"VLLM_MARLIN_USE_ATOMIC_ADD": "1"},
    },
    "spark-vllm-docker-1.yaml": {
        "limits": {"memory_fraction": 0.5, "max_sequences": 4},
        "load_format": "fastsafetensors",
        "options": {"enable-chunked-prefill": True},
        "prefix_caching": True,
    },
    "nvidia.yaml": {
        "limits": {"max_context_tokens": 262144, "max_sequences": 8},
        "speculation": {"method": "mtp", "tokens": 4, "repository": "maker/A-Model-assistant"},
    },
    "vllm-project.yaml": {
        "options": {"moe-backend": "marlin"},
        "limits": {"max_context_tokens": 131072},
        "environment": {"VLLM_USE_FLASHINFER_MOE_INT4": "1"},
    },
}
REPOSITORY = {
    "sparkrun-2.yaml": ("org/Small-Coder-FP8", "0123456789abcdef0123456789abcdef01234567"),
    "spark-vllm-docker-1.yaml": ("org/Dense-NVFP4", "main"),
    "nvidia.yaml": ("maker/A-Model-NVFP4", "main"),
    "vllm-project.yaml": ("org/Some-MoE-FP8", "main"),
}
# Used keys; every other key must be reported.
USED = {
    "sparkrun-2.yaml": {"recipe_version", "name", "description", "model", "model_revision",
                        "defaults", "env", "command", "min_nodes", "max_nodes"},
    "spark-vllm-docker-1.yaml": {"recipe_version", "name", "description", "model", "defaults",
                                 "env", "command", "solo_only", "cluster_only"},
    "nvidia.yaml": {"schema_version", "title", "model", "checkpoint", "topology", "serve",
                    "backend", "hardware"},
    "vllm-project.yaml": {"meta", "model", "features", "opt_in_features", "variants"},
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_recipe_is_converted_to_a_valid_catalog_file(name, tmp_path):
    draft = draft_from_recipe(READ[name], name)
    folder = tmp_path / "catalog/models"
    folder.mkdir(parents=True)
    (folder / f"{draft.name}.yml").write_text(draft.text())
    model = read_catalog(user_dir=tmp_path).model(draft.name)
    assert isinstance(model, PlainModel)
    assert (model.repository, model.revision) == REPOSITORY[name]
    [change] = model.changes
    assert change.set == CHANGED[name]
    assert model.imported
    assert "this project has not run it" in draft.text()
    assert (
        read_catalog(user_dir=tmp_path).profile("plain", draft.name).limits.max_batched_tokens
        == 8192
    )


@pytest.mark.parametrize("name", READ)
def test_every_recipe_key_is_used_or_reported(name):
    draft = draft_from_recipe(READ[name], name)
    text = "\n".join(draft.open_questions)
    for key in READ[name].keys() - USED[name]:
        assert f"not used: {key}:" in text, key


def test_code_and_secrets_in_a_recipe_are_reported_but_not_used():
    text = {
        name: "\n".join(draft_from_recipe(data, name).open_questions) for name, data in READ.items()
    }
    assert "--trust-remote-code: third-party code is never run" in text["sparkrun-2.yaml"]
    assert "environment HF_TOKEN" in text["sparkrun-2.yaml"]
    assert "defaults.never_said: the command does not use it" in text["sparkrun-2.yaml"]
    assert "pre_exec: third-party commands are never run" in text["sparkrun-2.yaml"]
    assert "--served-model-name: is set elsewhere" in text["sparkrun-2.yaml"]
    assert "--quantization: is set elsewhere" in text["spark-vllm-docker-1.yaml"]
    assert "mods: your setting images.engine selects" in text["spark-vllm-docker-1.yaml"]
    assert (
        "features.spec_decoding: the recipe does not enable this feature by default"
        in text["vllm-project.yaml"]
    )
    assert "variants.default" in text["vllm-project.yaml"]
    assert "not marked as verified on a DGX Spark" in text["vllm-project.yaml"]
    assert "--seed ${SEED}: the value needs shell expansion" in text["nvidia.yaml"]
    for word in ("HEAD_IP=$(hostname -i)", "2>&1", "|", "tee", "log"):
        assert f"command: {word}: only " in text["nvidia.yaml"]
    assert "hf_secret" not in "".join(draft_from_recipe(d, n).text() for n, d in READ.items())


def test_unlisted_options_are_reported_with_the_fix_and_not_used():
    command = (
        "VLLM_LOGGING_CONFIG_PATH=/model/x VLLM_SOME_SWITCH=1 vllm serve org/x --seed 1 "
        "--no-some-switch --ec-transfer-config.ec_connector_module_path ours "
        """--compilation-config '{"inductor_passes": {"post_grad_pass": "ours"}}'"""
    )
    draft = draft_from_recipe({"model": "org/x", "command": command}, "r")
    assert yaml.safe_load(draft.text())["changes"] == [{"set": {"options": {"seed": 1}}}]
    for name in ("environment VLLM_LOGGING_CONFIG_PATH", "environment VLLM_SOME_SWITCH",
                 "--some-switch", "--ec-transfer-config",
                 "--compilation-config.inductor_passes"):  # fmt: skip
        [line] = [line for line in draft.open_questions if line.startswith(f"not used: {name}: ")]
        assert "override_rails: {unlisted-option: REASON}" in line


def test_unknown_parser_in_a_recipe_is_omitted_and_reported():
    engine = shipped_catalog().engines.engines["0.33.0"]
    text = "--reasoning-parser nano_v3 --tool-call-parser qwen3_coder"
    draft = draft_from_recipe({"model": "org/x", "command": f"vllm serve {text}"}, "r", engine)
    assert (
        "not used: parsers.reasoning nano_v3: your engine does not have this parser"
        in draft.open_questions
    )
    assert yaml.safe_load(draft.text())["parsers"] == {"tool_call": "qwen3_coder"}


SEVERAL = (
    {"min_nodes": 2},
    {"cluster_only": True},
    {"command": "vllm serve org/x -tp 2"},
    {"command": "vllm serve org/x --pipeline-parallel-size=4"},
)


@pytest.mark.parametrize("changes", SEVERAL, ids=str)
def test_recipe_for_several_hosts_is_rejected(changes):
    with pytest.raises(CatalogError, match=r"requires \d+ GPUs"):
        draft_from_recipe({**READ["sparkrun-2.yaml"], **changes}, "r.yaml")


@pytest.mark.parametrize("command", ["python -m sglang.launch_server", "vllm 'serve"])
def test_recipe_command_without_vllm_serve_is_reported(command):
    draft = draft_from_recipe({"model": "org/x", "command": command}, "r.yaml")
    assert "not used: command: does not call `vllm serve`" in draft.open_questions


def test_recipe_with_a_huge_expanded_command_is_rejected():
    data = {"model": "org/x", "command": "{a}" * 10_000, "defaults": {"a": "x" * 1_000_000}}
    with pytest.raises(CatalogError, match="too long"):
        draft_from_recipe(data, "r.yaml")


def test_recipe_values_without_a_profile_equivalent_are_reported(tmp_path):
    text = "--max-model-len auto --kv-cache-dtype nvfp4 --max-num-seqs -1 --seed 1"
    data = {"model": "org/x", "command": f"vllm serve org/x {text}"}
    draft = draft_from_recipe(data, "r.yaml")
    text = "\n".join(draft.open_questions)
    for option in ("--max-model-len auto", "--kv-cache-dtype nvfp4", "--max-num-seqs -1"):
        assert f"{option}: not a valid value in a profile" in text
    assert yaml.safe_load(draft.text())["changes"] == [{"set": {"options": {"seed": 1}}}]


def written(data, name):
    try:
        return draft_from_recipe(data, name).text(), ()
    except CatalogError as error:
        return "", tuple(error.problems)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(place=st.sampled_from([(name, key) for name in READ for key in READ[name]]), value=YAML)
def test_any_recipe_yields_a_draft_model_or_a_single_error(place, value):
    name, key = place
    text, problems = written({**READ[name], key: value}, name)
    assert all(problem.line.isprintable() for problem in problems)
    assert len(problems) == 1 or yaml.safe_load(text)["kind"] == "plain"
