import dataclasses
import json
from typing import Any

import pytest
from hypothesis import example, given
from spark_contract.builder_api import RepositoryDescription

from spark_deploy.config.catalog.model import PlainModel
from spark_deploy.config.errors import LockError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.inventory.plans import unread_repositories, verified_lock, verify_names
from spark_deploy.lock import hub as lookup
from spark_deploy.lock.headers import make_metadata
from spark_deploy.lock.resolve import read_lock, validate_lock, write_lock
from spark_deploy.lock.types import EMPTY_LOCK
from tests.unit.hostile import accepted_or_refused, hostile, tries
from tests.unit.lockfile.hub_trees import (
    CATALOG,
    header_bytes,
    requested_ranges,
    sibling,
    write_repository,
)

REPO, COMMIT = "org/tiny-qwen3", "3" * 40
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 100, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
ENTRIES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed_tokens.weight": ("BF16", (100, 64)),
    "model.layers.0.mlp.down_proj.weight": ("F8_E4M3", (64, 64)),
    "model.layers.2.eh_proj.weight": ("BF16", (10, 10)),
    "model.visual.patch_embed.weight": ("BF16", (7, 10)),
    "mtp.fc.weight": ("BF16", (3, 10)),
}
MODEL = PlainModel(
    name="tiny", kind="plain", summary="Tiny", choose_when="tests", repository=REPO,
)  # fmt: skip
CATALOG_OF_ONE = dataclasses.replace(
    CATALOG,
    models={**CATALOG.models, "tiny": MODEL},
    profiles={**CATALOG.profiles, ("plain", "tiny"): CATALOG.profile("plain", "lab-tiny")},
)


def describe(config, parts=None):
    return RepositoryDescription(
        COMMIT, parts or {"text": {"BF16": 8}}, 1, False, {}, {"config.json": config}
    )


def read_metadata(**changes):
    config = {key: value for key, value in {**QWEN3, **changes}.items() if value != "removed"}
    return make_metadata(REPO, describe(config))


def settings_for(hub, tmp_path, **changes):
    overrides = {"model": "lab-tiny", "hub.endpoint": hub.url, **changes}
    result = load_hosts({"lab": ["a"]}, root=tmp_path, overrides=overrides)["a"].settings
    return dataclasses.replace(result, model="tiny", profile="plain")


def test_sums_weights_by_part_and_dtype(hub, tmp_path):
    config = {**QWEN3, "num_nextn_predict_layers": 1}
    write_repository(hub.root, REPO, ENTRIES, COMMIT, config)
    lock = EMPTY_LOCK.with_entries([lookup.look_up_repo(hub.url, REPO, "main", None)])
    hub.requests.clear()
    lock = verify_names(settings_for(hub, tmp_path), CATALOG_OF_ONE, lock, lambda text: None)
    result = lock.repo_metadata[REPO]
    assert result.weights == {"BF16": 100 * 64 * 2, "F8_E4M3": 64 * 64}
    assert (result.vision_bytes, result.drafter_bytes) == (140, 200 + 60)
    assert result.architecture == "Qwen3ForCausalLM"
    assert all(last < header_bytes(path) for path, last in requested_ranges(hub, REPO))
    write_lock(tmp_path / "spark.lock.yml", lock)
    assert read_lock(tmp_path / "spark.lock.yml") == lock
    moved = dataclasses.replace(lock.sources[REPO], commit="4" * 40)
    assert lock.with_entries([moved]).repo_metadata == {}


def test_requiring_a_lock_rejects_repositories_with_unread_headers(hub, tmp_path):
    write_repository(hub.root, REPO, ENTRIES, COMMIT, QWEN3)
    lock = EMPTY_LOCK.with_entries([lookup.look_up_repo(hub.url, REPO, "main", None)])
    settings = settings_for(hub, tmp_path, locked="required")
    unread = unread_repositories(settings, CATALOG_OF_ONE, lock)
    assert [item.repository for item in unread] == [REPO]
    path = tmp_path / "spark.lock.yml"
    with pytest.raises(LockError, match="have not been read yet"):
        verified_lock(settings, CATALOG_OF_ONE, path, lock, lambda text: None)


@pytest.mark.slow
def test_weights_of_excluded_files_are_not_counted(hub, tmp_path):
    folder = write_repository(hub.root, REPO, ENTRIES, COMMIT, QWEN3)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "consolidated.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    for listing in (hub.root / "api/models" / REPO / "revision").iterdir():
        output = json.loads(listing.read_text())
        output["siblings"] = [sibling(path) for path in sorted(folder.iterdir())]
        listing.write_text(json.dumps(output))
    settings, say = settings_for(hub, tmp_path), list[str]().append
    lock = EMPTY_LOCK.with_entries([lookup.look_up_repo(hub.url, REPO, "main", None)])
    lock = verify_names(settings, CATALOG_OF_ONE, lock, say)
    assert lock.repo_metadata[REPO].repeats_names
    model = dataclasses.replace(MODEL, leave_out=("consolidated*",))
    models = {**CATALOG_OF_ONE.models, "tiny": model}
    catalog = dataclasses.replace(CATALOG_OF_ONE, models=models)
    lock = verify_names(settings, catalog, lock, say)
    assert not lock.repo_metadata[REPO].repeats_names
    assert not list(unread_repositories(settings, catalog, lock))


MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "deepseek_v3"}
NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "model_type": "qwen3_next",
}  # fmt: skip
MAMBA = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "num_hidden_layers": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
    "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32",
}  # fmt: skip
CACHES = {
    "full": ({}, [("full", 2, 2 * 2 * 32 * 2, 0, 0)]),
    "no head_dim": ({"head_dim": "removed"}, [("full", 2, 2 * 2 * 16 * 2, 0, 0)]),
    "sliding": ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
     [("full", 1, 256, 0, 0), ("sliding", 1, 256, 128, 0)]),
    "latent": (MLA, [("latent", 2, 576 * 2, 0, 0)]),
    # Only Qwen3.5 and Qwen4Exp state a format; vLLM stores other states like the activations.
    "delta net": (NET, [("full", 1, 256, 0, 0), ("state", 1, 0, 0, 4 * 8 * 8 * 2 + 3 * 64 * 2)]),
    "delta net in FP32": ({**NET, "mamba_ssm_dtype": "float32"},
     [("full", 1, 256, 0, 0), ("state", 1, 0, 0, 4 * 8 * 8 * 4 + 3 * 64 * 2)]),
    "mamba": (MAMBA,
     [("full", 1, 256, 0, 0), ("state", 1, 0, 0, 4 * 8 * 16 * 4 + 3 * (32 + 64) * 2)]),
    "mamba without a format": ({**MAMBA, "mamba_ssm_cache_dtype": "removed"},
     [("full", 1, 256, 0, 0), ("state", 1, 0, 0, 4 * 8 * 16 * 4 + 3 * (32 + 64) * 2)]),
    "inside": ({"num_hidden_layers": "removed", "text_config": {**QWEN3, "num_hidden_layers": 3}},
     [("full", 3, 256, 0, 0)]),
    "encoder": ({"model_type": "bert"}, []),
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES)
def test_computes_cache_size_per_layer_type(kind):
    changes, expected = CACHES[kind]
    result = read_metadata(**changes)
    fields = ("kind", "layers", "token_bytes", "window_tokens", "state_bytes")
    assert [tuple(getattr(item, name) for name in fields) for item in result.cache] == expected
    assert result.cache_unknown == ""


UNKNOWN = {
    "another type of model": ({"model_type": "unheard"}, "the layer types of unheard are unknown"),
    "another type of layer": ({"layer_types": ["full_attention", "odd"]}, "layer type 'odd'"),
    "layers that do not add up": ({"layer_types": ["full_attention"]}, "but the model has 2"),
    "an indexer": ({"indexer_n_heads": 4}, "the effect of indexer_n_heads"),
    "a detail": ({"num_kv_shared_layers": 20}, "the effect of num_kv_shared_layers"),
    "a number is missing": ({"num_attention_heads": "removed"}, "lacks num_attention_heads"),
    "no layers": ({"num_hidden_layers": 0}, "lacks num_hidden_layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_reports_why_the_cache_size_is_unknown(case):
    changes, reason = UNKNOWN[case]
    result = read_metadata(**changes)
    assert reason in result.cache_unknown
    assert result.cache == ()


IMPOSSIBLE = ({"num_hidden_layers": -3}, {"head_dim": 2**80}, {"num_key_value_heads": "8"},
              {"max_position_embeddings": 4096.5}, {"hidden_size": True})  # fmt: skip


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_rejects_out_of_range_numbers_in_config_json(changes):
    with pytest.raises(LockError) as refused:
        read_metadata(**changes)
    [problem] = refused.value.problems
    [name] = changes
    assert problem.what.startswith(f"{name} is ")
    assert "\n" not in problem.what


EVERYTHING = {
    **QWEN3,
    **NET,
    **MAMBA,
    "layer_types": ["full_attention"] * 4,
    "quantization_config": {"quant_method": "fp8", "bits": 8},
    "text_config": MLA,
}


@tries(200)
@given(text=hostile(json.dumps(QWEN3).encode()) | hostile(json.dumps(EVERYTHING).encode()))
@example(text=json.dumps({**QWEN3, "architectures": [["a"]]}).encode())
@example(text=json.dumps({**QWEN3, "architectures": "LlamaForCausalLM"}).encode())
@example(text=json.dumps({**QWEN3, "layer_types": [7, None]}).encode())
@example(text=json.dumps({**QWEN3, "num_hidden_layers": 2**31}).encode())
@example(text=json.dumps({**QWEN3, "num_attention_heads": 2**31, "hidden_size": 1}).encode())
@example(text=json.dumps({**QWEN3, "quantization_config": [1]}).encode())
@example(text=json.dumps({**QWEN3, "model_type": "q\x1b[2Jwen"}).encode())
def test_any_config_json_is_read_or_rejected(text):
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return  # the reader of the headers refuses it: test_hostile_hub.py
    if not isinstance(config, dict):
        return
    with accepted_or_refused(in_one_line=True):
        metadata = make_metadata(REPO, describe(config))
        source = lookup._make_source("here", REPO, "main", _Info)
        lock = validate_lock(EMPTY_LOCK.with_entries([source], repo_metadata=[metadata]))
        assert str(lock.repo_metadata[REPO]).isprintable()


class _Info:
    sha = COMMIT
    siblings = (type("S", (), {"rfilename": "config.json", "size": 1, "lfs": None,
                               "blob_id": "b" * 40}),)  # fmt: skip
