"""Results in the forms of others: Spark Arena's folder, NVIDIA's file; nothing is made up."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from spark_deploy.bench import submission
from spark_deploy.bench.result import Load
from spark_deploy.cli import bench
from spark_deploy.cli.hosts import Target
from spark_deploy.cli.recipes import draft_of_recipe
from tests.unit.bench.test_bench import CAPTURED, result
from tests.unit.planning.plans import plan_of

ORIGIN = submission.Origin("org/model-int4", "c" * 40, built=True)
LOAD = Load(2, 8192, 256, 20, 20, 7, 163_840, 5_120, 81.5, 1_600.0, 20.0, 6_700.0)
PLAN = plan_of("large", "v2")
RELEASE = PLAN.serve


def written(tmp_path, raw: dict[str, Any] | None = None, **more: Any) -> dict[str, str]:
    paths = submission.write(tmp_path, result(**more), RELEASE, ORIGIN, raw)
    return {path.name: path.read_text() for path in paths}


def test_the_csv_is_the_one_that_llama_benchy_writes_itself(tmp_path):
    raw = json.loads(CAPTURED.read_text())
    mine = list(csv.DictReader(written(tmp_path, raw)["benchmark.csv"].splitlines()))
    theirs = list(csv.DictReader(CAPTURED.with_suffix(".csv").read_text().splitlines()))
    assert mine == theirs
    assert list(mine[0]) == list(theirs[0])


def test_the_recipe_starts_what_was_measured_in_words_of_the_arena(tmp_path):
    recipe = yaml.safe_load(written(tmp_path, {"benchmarks": []})["recipe.yaml"])
    # Its backend takes no other version and no other runtime.
    assert (recipe["recipe_version"], recipe["runtime"]) == ("2", "vllm")
    assert (recipe["model"], recipe["model_revision"]) == ("org/model-int4", "c" * 40)
    words = recipe["command"].replace("\\\n", " ").split()
    assert words[:3] == ["vllm", "serve", "{model}"]
    argv = RELEASE.engine.argv
    assert words[words.index("--max-model-len") + 1] == argv[argv.index("--max-model-len") + 1]
    assert "built from this repository and others" in recipe["metadata"]["description"]


def test_metadata_names_the_recipe_by_its_hash_and_the_cases_that_were_measured(tmp_path):
    files = written(tmp_path, {"benchmarks": []})
    metadata = json.loads(files["metadata.json"])
    recipe = files["recipe.yaml"].encode()
    assert metadata["recipe"]["hash"] == hashlib.sha256(recipe).hexdigest()
    assert metadata["benchmark"]["args"] == {"depth": [0], "concurrency": [1]}


def test_nvidias_file_has_the_figures_and_no_word_that_the_host_did_not_say(tmp_path):
    served = replace(result().served, versions={"driver": "580.1", "cuda": "13.0"})
    files = written(tmp_path, loads=(LOAD,), vllm="0.32.0", served=served)
    found = yaml.safe_load(files["performance.yaml"])
    assert found["recipe_sha256"] == hashlib.sha256(files["recipe.yaml"].encode()).hexdigest()
    assert found["harness"] == {"name": "vllm bench serve", "version": "0.32.0"}
    assert set(found["system"]) == {
        "accelerator_count", "operating_system", "driver_version", "cuda_version",
    }  # fmt: skip
    [profile] = found["profiles"]
    assert profile["workload"]["input_tokens_total"] == 163_840
    assert profile["results"] == {
        "prefill_tokens_per_second_mean": 5120.0,  # 8192 in 1.6 s
        "decode_tokens_per_second_mean": 50.0,  # one in 20 ms
        "e2e_latency_ms_mean": 6700.0,
    }


def test_only_what_was_measured_has_a_file(tmp_path):
    assert set(written(tmp_path / "a")) == {"recipe.yaml"}
    assert set(written(tmp_path / "b", loads=(LOAD,))) == {"recipe.yaml", "performance.yaml"}


@pytest.mark.parametrize("profile", ["v2", "agent", "base"])
def test_our_own_reader_of_recipes_takes_it(profile):
    release = plan_of("large", profile).serve
    recipe = yaml.safe_load(submission._dump(submission.recipe_of(release, ORIGIN)))
    draft = draft_of_recipe(recipe, "recipe.yaml")
    assert (draft.repository, draft.revision) == (ORIGIN.repository, ORIGIN.commit)


@pytest.mark.parametrize(
    ("versions", "portable", "why"),
    [
        ({"driver": "580.1"}, False, ""),
        ({"driver": "580.1+labstub"}, False, "Stand-ins: driver 580.1+labstub. "),
        ({"driver": "580.1"}, True, "Portable mode: "),
    ],
)
def test_only_what_a_real_gpu_computed_gets_a_folder_for_others(
    tmp_path, monkeypatch, capsys, versions, portable, why
):
    monkeypatch.setattr(bench, "build_plan", lambda one: PLAN)
    served = replace(result().served, versions=versions, portable=portable)
    found = result(cells=(), loads=(LOAD,), vllm="0.32.0", served=served)
    one = cast(Target, SimpleNamespace(name="spark-1"))
    bench._write_submission(one, RELEASE, found, tmp_path / "a", tmp_path / "raw")
    told = capsys.readouterr().err
    assert (tmp_path / "a.submission").exists() == (not why)
    assert (f"no folder for submission. {why}" in told) == bool(why)
