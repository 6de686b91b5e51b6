"""``spark-deploy add``: a catalog file from a repository, checked, planned, with open questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_deploy.cli import main
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from tests import forked
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.lockfile.hub_trees import write_repository

COMMIT = "5" * 40
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip
ENTRIES: dict[str, tuple[str, tuple[int, ...]]] = {"model.norm.weight": ("BF16", (64,))}
INVENTORY = """
import sys as _sys
_sys.path.insert(0, {checkout!r})
from spark_deploy.inventory import group_from as _group_from
spark = _group_from("spark", hosts=["a"], file=__file__)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as running:
        yield running


def publish(
    hub: Hub, repo: str, config: dict[str, Any], listing: dict[str, Any] | None = None, **files: Any
) -> None:
    """Publish a repository with documents and metadata on the hub."""
    folder = hub.root / repo / "resolve" / COMMIT
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    write_repository(hub.root, repo, ENTRIES, COMMIT, config)
    for revision in ("main", COMMIT):
        path = hub.root / "api/models" / repo / "revision" / revision
        path.write_text(json.dumps({**json.loads(path.read_text()), **(listing or {})}))


@pytest.fixture
def site(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forked.fork_builder(monkeypatch)
    return make_site(tmp_path / "site", hub)


def make_site(root: Path, hub: Hub) -> Path:
    """Write an owner's folder with locked images."""
    (root / "group_vars").mkdir(parents=True)
    choices = f"hub: {{endpoint: {hub.url!r}}}\n"
    (root / "group_vars/spark.yml").write_text(choices)
    (root / "sparks.py").write_text(INVENTORY.format(checkout=str(CHECKOUT)))
    lock = {
        "schema_version": 1,
        "sources": {},
        "images": {
            name: {"digest": f"sha256:{'1' * 64}", "size_bytes": 1000}
            for name in (*_images(root / "sparks.py"),)
        },
    }
    (root / "spark.lock.yml").write_text(yaml.safe_dump(lock))
    return root


def _images(inventory: Path) -> list[str]:
    from spark_deploy.config.settings.types import Settings

    return list(Settings().images.values())


def add(site: Path, place: str, *extra: str) -> int:
    return main(["add", place, "--inventory", str(site / "sparks.py"), *extra])


def test_one_command_writes_a_file_that_plans(
    hub: Hub, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(
        hub, "org/Tiny-Chat", CONFIG, {"pipeline_tag": "text-generation", "tags": ["license:mit"]},
        tokenizer_config__json={"chat_template": "{{ messages }}"},
        generation_config__json={"temperature": 0.6, "top_p": "odd"},
    )  # fmt: skip
    assert add(site, "org/Tiny-Chat") == 0
    path = site / "catalog/models/tiny-chat.yml"
    text, data = path.read_text(), yaml.safe_load(path.read_text())
    # Pinned to the read commit; parsers with a source; sampling without guesses.
    assert (data["repository"], data["revision"]) == ("org/Tiny-Chat", COMMIT)
    assert data["parsers"] == {"reasoning": "qwen3", "tool_call": "hermes"}
    assert "# From vllm-project/recipes" in text
    assert "licence: mit" in text
    assert "temperature 0.6" in text
    assert "odd" not in text
    model = read_catalog(own=site).model("tiny-chat")
    assert model.check.tool_call
    out = capsys.readouterr().out
    assert "org/Tiny-Chat at 555555555555" in out
    assert "UNPROVEN" in out
    # An existing file is not overwritten.
    assert add(site, "org/Tiny-Chat") == 1
    assert "--force" in capsys.readouterr().err
    assert add(site, "org/Tiny-Chat", "--force") == 0


def test_json_lists_files_open_questions_and_next_commands(
    hub: Hub, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(hub, "org/Tiny-Chat", CONFIG, tokenizer_config__json={"chat_template": "x"})
    assert add(site, "org/Tiny-Chat", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == [str(site / "catalog/models/tiny-chat.yml")]
    assert (result["model"], result["profile"]) == ("tiny-chat", "plain")
    assert result["fetched_bytes"] > 0
    assert "org/Tiny-Chat" in result["unproven"]
    # As they are to be typed here: the inventory is not that of the folder.
    same = f"--inventory {site / 'sparks.py'}"
    expected = [f"spark-deploy use tiny-chat/plain {same}", f"spark-deploy up {same}"]
    assert (result["next"], result["problems"]) == (expected, [])

    assert add(site, "org/Tiny-Chat", "--json", "--use", "--force") == 0
    result = json.loads(capsys.readouterr().out)
    chosen = {(item["key"], item["after"], item["file"]) for item in result["chosen"]}
    settings = str(site / "group_vars/spark.yml")
    assert chosen == {("model", "tiny-chat", settings), ("profile", "plain", settings)}
    assert result["next"] == [f"spark-deploy up a {same}"]


def test_json_contains_the_problems_of_an_impossible_model(
    hub: Hub, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(hub, "org/new", {**CONFIG, "architectures": ["BrandNewForCausalLM"]},
            tokenizer_config__json={"chat_template": "x"})  # fmt: skip
    assert add(site, "org/new", "--json") == 1
    text = capsys.readouterr()
    result = json.loads(text.out)
    [problem] = result["problems"]
    assert "BrandNewForCausalLM" in problem["what"]
    assert "BrandNewForCausalLM" in text.err
    assert (result["release"], result["next"]) == (None, [])
    assert result["files"] == [str(site / "catalog/models/new.yml")]


def test_the_file_names_an_existing_schema(hub: Hub, site: Path) -> None:
    publish(hub, "org/tiny", CONFIG, tokenizer_config__json={"chat_template": "x"})
    (site / "schema").mkdir()
    (site / "schema/plain_model.schema.json").write_text("{}")
    assert add(site, "org/tiny") == 0
    first = (site / "catalog/models/tiny.yml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=../../schema/plain_model.schema.json"


KINDS = {
    "org/base-model": ({}, {}, "completion"),
    "org/some-embedding": ({"tokenizer_config__json": {"chat_template": "x"}}, {}, "embedding"),
    "org/vectors": ({"modules__json": [1]}, {}, "embedding"),
    "org/by-the-hub": ({}, {"pipeline_tag": "sentence-similarity"}, "embedding"),
    "org/ranks": ({}, {"pipeline_tag": "text-ranking"}, "reranking"),
    "org/sorts": ({}, {"pipeline_tag": "text-classification"}, "classification"),
}


@pytest.mark.parametrize("repo", KINDS)
def test_the_task_is_read_from_files_and_hub(hub: Hub, site: Path, repo: str) -> None:
    files, listing, task = KINDS[repo]
    publish(hub, repo, CONFIG, listing, **files)
    assert add(site, repo) == 0
    data = yaml.safe_load((site / f"catalog/models/{repo.partition('/')[2]}.yml").read_text())
    assert data["task"] == task
    assert "parsers" not in data


def test_unknown_values_are_left_out_and_reported(
    hub: Hub, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**CONFIG, "model_type": "nobody", "auto_map": {"AutoModel": "m.Model"}}
    publish(hub, "org/odd", config, tokenizer_config__json={"chat_template": "x"})
    assert add(site, "org/odd") == 0
    out = capsys.readouterr().out
    assert "parsers: unknown for nobody" in out
    assert "KV cache of a token: layers of nobody are unknown" in out
    assert "custom code; not downloaded" in out
    assert "parsers" not in yaml.safe_load((site / "catalog/models/odd.yml").read_text())


def test_an_unknown_architecture_is_refused_and_the_file_stays(
    hub: Hub, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(hub, "org/new", {**CONFIG, "architectures": ["BrandNewForCausalLM"]},
            tokenizer_config__json={"chat_template": "x"})  # fmt: skip
    assert add(site, "org/new") == 1
    err = capsys.readouterr().err
    assert "BrandNewForCausalLM" in err
    assert (site / "catalog/models/new.yml").exists()


@pytest.mark.parametrize("place", ["org", "../../etc/passwd", "org/nothing", "org/na me"])
def test_an_invalid_repository_is_one_problem_and_no_file(
    site: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(site, place) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert not list((site / "catalog").rglob("*.yml"))


def test_texts_of_a_hub_stay_in_their_comment_line(hub: Hub, site: Path) -> None:
    publish(hub, "org/words", CONFIG, {"tags": ["license:mit\nkind: hybrid\x1b[2J"]},
            tokenizer_config__json={"chat_template": "x"})  # fmt: skip
    assert add(site, "org/words") == 0
    text = (site / "catalog/models/words.yml").read_text()
    assert yaml.safe_load(text)["kind"] == "plain"
    assert all(line.isprintable() for line in text.splitlines())


def test_the_profile_applies_to_the_new_model_only(hub: Hub, site: Path) -> None:
    publish(hub, "org/tiny", CONFIG, tokenizer_config__json={"chat_template": "x"})
    profiles = site / "catalog/profiles"
    profiles.mkdir(parents=True)
    mine = "based_on: plain\nsummary: Mine\nchoose_when: I do\n"
    # The default model fits nowhere with so little of the memory.
    (profiles / "mine.yml").write_text(f"{mine}limits: {{memory_fraction: 0.1}}\n")
    assert add(site, "org/tiny", "--profile", "mine") == 0


def test_a_recipe_is_added(hub: Hub, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(hub, "org/Dense-NVFP4", CONFIG)
    recipe = CHECKOUT / "tests/fixtures/recipes/spark-vllm-docker-1.yaml"
    assert add(site, str(recipe)) == 0
    out = capsys.readouterr().out
    assert "OPEN        not used: mods: the engine image is images.engine" in out
    assert "--load-format fastsafetensors" in out
    data = yaml.safe_load((site / "catalog/models/dense-nvfp4.yml").read_text())
    assert data["imported"] == [
        "a recipe of sparkrun or spark-vllm-docker, version 1, spark-vllm-docker-1.yaml"
    ]


def test_use_selects_the_new_model(hub: Hub, site: Path) -> None:
    publish(hub, "org/new", CONFIG, tokenizer_config__json={"chat_template": "{{ messages }}"})
    assert add(site, "org/new") == 0
    settings = site / "group_vars/spark.yml"
    assert "model" not in yaml.safe_load(settings.read_text())
    assert add(site, "org/new", "--use", "--force") == 0
    chosen = yaml.safe_load(settings.read_text())
    assert (chosen["model"], chosen["profile"]) == ("new", "plain")
    assert chosen["hub"]["endpoint"] == hub.url


IMPOSSIBLE = {
    "that fits on no host": "model: qwen3.5-397b\n",
    "that is in no catalog": "model: nobody-has-this\nprofile: nor-this\n",
    "of a profile with another model": "profile: plain\n",
}


@pytest.mark.parametrize("present", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_use_replaces_a_choice_that_cannot_be_served(
    hub: Hub, site: Path, present: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(hub, "org/new", CONFIG, tokenizer_config__json={"chat_template": "{{ messages }}"})
    settings = site / "group_vars/spark.yml"
    settings.write_text(settings.read_text() + present)
    assert add(site, "org/new", "--use") == 0, capsys.readouterr().err
    chosen = yaml.safe_load(settings.read_text())
    assert (chosen["model"], chosen["profile"]) == ("new", "plain")


def test_a_schedule_does_not_apply_to_the_new_model(
    hub: Hub, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(hub, "org/new", CONFIG, tokenizer_config__json={"chat_template": "{{ messages }}"})
    settings = site / "group_vars/spark.yml"
    night = "[{at: '20:00', model: qwen3.5-122b, profile: v2}]"
    settings.write_text(f"{settings.read_text()}schedule: {night}\n")
    assert add(site, "org/new") == 0
    # To serve it is another matter: no time of the schedule would lead back to it.
    before = settings.read_text()
    assert add(site, "org/new", "--use", "--force") == 1
    assert "no time leads back to new with plain" in capsys.readouterr().err
    assert settings.read_text() == before
