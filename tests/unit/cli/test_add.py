import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_deploy.cli import main
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.types import Settings
from tests import forked
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.cli.targets import write_inventory
from tests.unit.lockfile.hub_trees import write_repository

COMMIT = "5" * 40
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip
CHAT = {"tokenizer_config.json": {"chat_template": "{{ messages }}"}}
ENTRIES: dict[str, tuple[str, tuple[int, ...]]] = {"model.norm.weight": ("BF16", (64,))}


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def site(hub, tmp_path, monkeypatch):
    forked.fork_builder(monkeypatch)
    return make_site(tmp_path / "site", hub)


def publish(hub, repo, files=CHAT, listing=None, **config):  # fmt: skip
    folder = hub.root / repo / "resolve" / COMMIT
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    write_repository(hub.root, repo, ENTRIES, COMMIT, {**CONFIG, **config})
    for revision in ("main", COMMIT):
        path = hub.root / "api/models" / repo / "revision" / revision
        path.write_text(json.dumps({**json.loads(path.read_text()), **(listing or {})}))


def make_site(root, hub):
    (root / "group_vars").mkdir(parents=True)
    (root / "group_vars/spark.yml").write_text(f"hub: {{endpoint: {hub.url!r}}}\n")
    write_inventory(root / "sparks.py", "a")
    image = {"digest": f"sha256:{'1' * 64}", "size_bytes": 1000}
    images = dict.fromkeys(Settings().images.values(), image)
    lock = {"schema_version": 1, "sources": {}, "images": images}
    (root / "spark.lock.yml").write_text(json.dumps(lock))
    return root


def add(site, place, *extra):
    return main(["add", place, "--inventory", str(site / "sparks.py"), *extra])


def catalog_file(site, name):
    data: dict[str, Any] = yaml.safe_load((site / f"catalog/models/{name}.yml").read_text())
    return data


def test_add_writes_a_catalog_file_that_can_be_planned(hub, site, capsys):
    generation = {"temperature": 0.6, "top_p": "odd"}
    publish(
        hub, "org/Tiny-Chat", {**CHAT, "generation_config.json": generation},
        {"pipeline_tag": "text-generation", "tags": ["license:mit\nkind: hybrid\x1b[2J"]},
    )  # fmt: skip
    (site / "schema").mkdir()
    (site / "schema/plain_model.schema.json").write_text("{}")
    assert add(site, "org/Tiny-Chat") == 0
    text, data = (
        (site / "catalog/models/tiny-chat.yml").read_text(),
        catalog_file(site, "tiny-chat"),
    )
    schema = "# yaml-language-server: $schema=../../schema/plain_model.schema.json"
    assert text.splitlines()[0] == schema
    assert (data["repository"], data["revision"]) == ("org/Tiny-Chat", COMMIT)
    assert data["parsers"] == {"reasoning": "qwen3", "tool_call": "hermes"}
    for part in ("# From vllm-project/recipes", "license: mit", "temperature 0.6"):
        assert part in text
    assert "odd" not in text
    assert data["kind"] == "plain"
    assert all(line.isprintable() for line in text.splitlines())
    assert read_catalog(user_dir=site).model("tiny-chat").check.tool_call
    out = capsys.readouterr().out
    assert "org/Tiny-Chat at 555555555555" in out
    assert "UNPROVEN" in out
    assert add(site, "org/Tiny-Chat") == 1
    assert "--force" in capsys.readouterr().err
    assert add(site, "org/Tiny-Chat", "--force") == 0


def test_add_json_lists_files_choices_and_next_commands(hub, site, capsys):
    publish(hub, "org/Tiny-Chat")
    assert add(site, "org/Tiny-Chat", "--json", "--use") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == [str(site / "catalog/models/tiny-chat.yml")]
    assert (result["model"], result["profile"]) == ("tiny-chat", "plain")
    assert result["fetched_bytes"] > 0
    assert result["problems"] == []
    settings = str(site / "group_vars/spark.yml")
    chosen = {(item["key"], item["after"], item["file"]) for item in result["chosen"]}
    assert chosen == {("model", "tiny-chat", settings), ("profile", "plain", settings)}
    assert result["next"] == [f"spark-deploy up a --inventory {site / 'sparks.py'}"]


def test_add_reports_an_unknown_architecture_and_keeps_the_file(hub, site, capsys):
    publish(hub, "org/new", architectures=["BrandNewForCausalLM"])
    assert add(site, "org/new", "--json") == 1
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    [problem] = result["problems"]
    assert "BrandNewForCausalLM" in problem["what"]
    assert "BrandNewForCausalLM" in captured.err
    assert (result["release"], result["next"]) == (None, [])
    assert Path(result["files"][0]).exists()


@pytest.mark.parametrize(
    ("repo", "files", "listing", "task"),
    [
        ("org/base-model", {}, {}, "completion"),
        ("org/some-embedding", CHAT, {}, "embedding"),
        ("org/vectors", {"modules.json": [1]}, {}, "embedding"),
        ("org/by-the-hub", {}, {"pipeline_tag": "sentence-similarity"}, "embedding"),
        ("org/ranks", {}, {"pipeline_tag": "text-ranking"}, "reranking"),
        ("org/sorts", {}, {"pipeline_tag": "text-classification"}, "classification"),
    ],
)
def test_add_reads_the_task_from_repository_files_and_hub(hub, site, repo, files, listing, task):
    publish(hub, repo, files, listing)
    assert add(site, repo) == 0
    data = catalog_file(site, repo.partition("/")[2])
    assert data["task"] == task
    assert "parsers" not in data


def test_add_omits_and_reports_unknown_values(hub, site, capsys):
    publish(hub, "org/odd", model_type="newtype", auto_map={"AutoModel": "m.Model"})
    assert add(site, "org/odd") == 0
    out = capsys.readouterr().out
    for text in (
        "parsers: unknown for newtype",
        "KV cache size per token: the layer types of newtype are unknown",
        "custom code, which is not downloaded",
    ):  # fmt: skip
        assert text in out
    assert "parsers" not in catalog_file(site, "odd")


@pytest.mark.parametrize("place", ["org", "../../etc/passwd", "org/nothing", "org/na me"])
def test_add_writes_no_file_for_an_invalid_repository(site, place, capsys):
    assert add(site, place) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not list((site / "catalog").rglob("*.yml"))


def test_add_converts_a_recipe(hub, site, capsys):
    publish(hub, "org/Dense-NVFP4", {})
    recipe = CHECKOUT / "tests/fixtures/recipes/spark-vllm-docker-1.yaml"
    assert add(site, str(recipe)) == 0
    out = capsys.readouterr().out
    assert "OPEN        not used: mods: your setting images.engine selects" in out
    assert "--load-format fastsafetensors" in out
    assert catalog_file(site, "dense-nvfp4")["imported"] == [
        "a recipe for sparkrun or spark-vllm-docker, version 1, spark-vllm-docker-1.yaml"
    ]


@pytest.mark.parametrize(
    "present",
    ["", "model: qwen3.5-397b\n", "model: no-such-model\nprofile: no-such-profile\n",
     "profile: plain\n"],
    ids=["no choice", "fits on no host", "not in the catalog", "profile of another model"],
)  # fmt: skip
def test_add_with_the_use_option_replaces_any_earlier_choice(hub, site, present, capsys):
    publish(hub, "org/new")
    settings = site / "group_vars/spark.yml"
    settings.write_text(settings.read_text() + present)
    assert add(site, "org/new", "--use") == 0, capsys.readouterr().err
    chosen = yaml.safe_load(settings.read_text())
    assert (chosen["model"], chosen["profile"]) == ("new", "plain")
    assert chosen["hub"]["endpoint"] == hub.url
