import csv
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import cast

import jsonschema
import pytest
import yaml
from results import BENCHY, LOAD, result
from spark_contract.documents import parse, to_json, to_plain

from spark_deploy.bench import report, submission
from spark_deploy.bench.result import BenchResult, Published
from spark_deploy.cli import bench, main
from spark_deploy.cli.hosts import Target
from spark_deploy.cli.recipes import draft_from_recipe
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from tests.unit.planning.plans import plan_of

ORIGIN = submission.Origin("org/model-int4", "c" * 40, is_built=True)
PLAN = plan_of("large", "v2")
RELEASE = PLAN.release


@pytest.fixture
def without_plots(monkeypatch):
    monkeypatch.setattr(report, "has_plots", lambda: False)


def test_report_omits_warm_up_and_protocols_that_did_not_run():
    text = report.render_markdown([result()])
    assert "| Q&A 256 | 50.0 |" in text
    assert "| 1.0 |" not in text
    for absent in ("vllm-bench", "published", "Not valid"):
        assert absent not in text


def test_a_comparison_shows_the_change_from_the_first_result(without_plots):
    slow = replace(LOAD, output_tokens_per_s=40.0)
    fast = replace(LOAD, output_tokens_per_s=50.0)
    results = [result("v2", 50.0, loads=(slow,)), result("v2-tq", 40.0, loads=(fast,))]
    text = report.render_markdown(results)
    for line in (
        "| tok/s | v2 | v2-tq |",
        "| Q&A 256 | 50.0 | 40.0 (-20 %) |",
        "| 0, 1 | 50.0 | 40.0 (-20 %) |",
        "| 8192, 256, 2: tok/s, sum over all clients | 40.0 | 50.0 (+25 %) |",
        "| minimum memory available, GB | 7.5 | 7.5 |",
        "| drafts accepted | 80% | 80% |",
    ):
        assert line in text
    assert "<td>50.0 (+25 %)</td>" in report.render_page(results)


def test_published_figures_are_shown_with_their_source():
    figure = Published(28.3, "a stack of spring 2026; not measured by this project")
    text = report.render_markdown([result("base", published=(figure,)), result("v2-native")])
    assert "| published, not measured here | 28.3 | - |" in text
    assert "Published: 28.3 for base: a stack of spring 2026; not measured" in text


@pytest.mark.parametrize(
    ("model", "profile", "figures"),
    [
        ("qwen3.5-122b", "v2", [51]),
        ("qwen3.5-35b", "v2", [112]),
        ("qwen3.5-122b", "hybrid-mtp2", []),
        ("unknown", "v2", []),
    ],
)
def test_comparison_shows_published_figures_of_the_same_model_and_profile(model, profile, figures):
    served = replace(result().served, model=model, profile=profile)
    published = bench.published_figures(read_catalog(), served)
    assert [figure.tokens_per_s for figure in published] == figures


@pytest.mark.parametrize(
    ("other", "title"),
    [
        ([], "m with v2 on spark-1"),
        ([result("v2-tq")], "m on spark-1: v2 against v2-tq"),
        (
            [result(served=replace(result().served, host="spark-2"))],
            "m with v2: v2 on spark-1 against v2 on spark-2",
        ),
        (
            [result(served=replace(result().served, cpus="5-9"))],
            "m with v2 on spark-1: v2, CPUs all against v2, CPUs 5-9",
        ),
        (
            [result(at="2026-02-02T00:00:00Z")],
            "m with v2 on spark-1: v2, 2026-01-01T00:00:00Z against v2, 2026-02-02T00:00:00Z",
        ),
    ],
)
def test_report_title_lists_shared_and_differing_properties_of_results(other, title):
    assert report.make_title([result(), *other]) == title


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href")]


def test_report_page_is_self_contained_and_escapes_text():
    results = [result(notes=("<script>alert(1)</script>",)), result("v2-tq", 40.0)]
    page = report.render_page(results)
    parser = Tags()
    parser.feed(page)
    assert all(link.startswith("#") for link in parser.links)
    assert page.count("url(") == page.count("url(#")
    assert "script" not in parser.tags
    assert parser.tags.count("svg") == 3
    assert all(name in page for name in ("tokens per second", ">v2-tq<", "currentColor"))


def test_report_page_has_tables_if_matplotlib_is_missing(without_plots):
    page = report.render_page([result()])
    assert "<svg" not in page
    assert page.count("<table>") == 3
    assert "<p></p>" not in page


def test_result_file_matches_its_schema_and_is_read_back_unchanged():
    schema = json.loads((CHECKOUT / "schema/bench.schema.json").read_text())
    jsonschema.validate(to_plain(result()), schema)
    assert parse(BenchResult, to_json(result())) == result()


def test_virtual_lab_results_are_marked(without_plots):
    lab = parse(BenchResult, (CHECKOUT / "tests/fixtures/bench-of-two-protocols.json").read_text())
    reason = lab.served.invalid_reason
    assert reason.startswith("Stand-ins: driver 580.159.03+labstub, toolkit 1.19.0+labstub. ")
    assert f"\n\n**{reason}**\n\n" in report.render_markdown([lab])
    assert f"<strong>{reason}</strong>" in report.render_page([lab])
    both = [result(), lab]
    assert f"**{report.column_names(both)[1]}: {reason}**" in report.render_markdown(both)


def test_compare_reads_result_files_and_rejects_other_files(tmp_path, without_plots, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, content in zip(files, (result(), result("v2-tq", 40.0)), strict=True):
        file.write_text(to_json(content))
    words = ["bench", "--out", str(tmp_path / "out"), *(f"--compare={file}" for file in files)]
    assert main(words) == 0
    assert "40.0 (-20 %)" in capsys.readouterr().out
    assert (tmp_path / "out/comparison.html").read_text().startswith("<!doctype html>")
    files[1].write_text('{"at": 1}')
    assert main(words) == 1
    assert f"{files[1]}: invalid benchmark result" in capsys.readouterr().err


def test_bench_json_of_several_hosts_is_one_document(tmp_path, monkeypatch, without_plots, capsys):
    hosts = [SimpleNamespace(name=name) for name in ("a", "b")]
    monkeypatch.setattr(bench, "select_hosts", lambda options, must_serve: hosts)
    monkeypatch.setattr(bench, "_measure_host", lambda host, how, out: (result(), host.name))
    assert main(["bench", "--out", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert (tmp_path / "b.md").exists()


def submit(tmp_path, raw=None, **changes):
    paths = submission.write_submission(tmp_path, result(**changes), RELEASE, ORIGIN, raw)
    return {path.name: path.read_text() for path in paths}


def test_csv_has_the_format_of_llama_benchy(tmp_path):
    text = submit(tmp_path, json.loads(BENCHY.read_text()))["benchmark.csv"]
    rows, recorded = (
        list(csv.DictReader(lines.splitlines()))
        for lines in (text, BENCHY.with_suffix(".csv").read_text())
    )
    assert rows == recorded
    assert list(rows[0]) == list(recorded[0])


def test_the_recipe_starts_the_measured_release(tmp_path):
    files = submit(tmp_path, {"benchmarks": []})
    recipe = yaml.safe_load(files["recipe.yaml"])
    assert (recipe["recipe_version"], recipe["runtime"]) == ("2", "vllm")
    assert (recipe["model"], recipe["model_revision"]) == ("org/model-int4", "c" * 40)
    words = recipe["command"].replace("\\\n", " ").split()
    assert words[:3] == ["vllm", "serve", "{model}"]
    argv = RELEASE.engine.argv
    assert words[words.index("--max-model-len") + 1] == argv[argv.index("--max-model-len") + 1]
    assert "built from several repositories" in recipe["metadata"]["description"]
    metadata = json.loads(files["metadata.json"])
    digest = hashlib.sha256(files["recipe.yaml"].encode()).hexdigest()
    assert metadata["recipe"]["hash"] == digest
    assert metadata["benchmark"]["args"] == {"depth": [0], "concurrency": [1]}


@pytest.mark.parametrize("profile", ["v2", "agent", "base"])
def test_add_reads_the_recipe_of_a_submission(profile):
    release = plan_of("large", profile).release
    recipe = yaml.safe_load(submission._dump(submission.make_recipe(release, ORIGIN)))
    draft = draft_from_recipe(recipe, "recipe.yaml")
    assert (draft.repository, draft.revision) == (ORIGIN.repository, ORIGIN.commit)


def test_performance_file_contains_only_measured_values(tmp_path):
    served = replace(result().served, versions={"driver": "580.1", "cuda": "13.0"})
    files = submit(tmp_path, loads=(LOAD,), vllm="0.32.0", served=served)
    assert set(files) == {"recipe.yaml", "performance.yaml"}
    document = yaml.safe_load(files["performance.yaml"])
    digest = hashlib.sha256(files["recipe.yaml"].encode()).hexdigest()
    assert document["recipe_sha256"] == digest
    assert document["harness"] == {"name": "vllm bench serve", "version": "0.32.0"}
    assert set(document["system"]) == {
        "accelerator_count", "operating_system", "driver_version", "cuda_version",
    }  # fmt: skip
    [profile] = document["profiles"]
    assert profile["workload"]["input_tokens_total"] == 163_840
    assert profile["results"] == {
        "prefill_tokens_per_second_mean": 5120.0,
        "decode_tokens_per_second_mean": 50.0,
        "e2e_latency_ms_mean": 6700.0,
    }


@pytest.mark.parametrize(
    ("versions", "portable", "reason"),
    [
        ({"driver": "580.1"}, False, ""),
        ({"driver": "580.1+labstub"}, False, "Stand-ins: driver 580.1+labstub. "),
        ({"driver": "580.1"}, True, "Portable mode: "),
    ],
)
def test_only_results_from_a_spark_can_be_submitted(
    tmp_path, monkeypatch, capsys, versions, portable, reason
):
    monkeypatch.setattr(bench, "build_plan", lambda _target: PLAN)
    served = replace(result().served, versions=versions, portable=portable)
    measured = result(cells=(), loads=(LOAD,), vllm="0.32.0", served=served)
    target = cast(Target, SimpleNamespace(name="spark-1"))
    bench._write_submission_folder(target, RELEASE, measured, tmp_path / "a", tmp_path / "raw")
    err = capsys.readouterr().err
    assert (tmp_path / "a.submission").exists() == (not reason)
    assert (f"cannot write a submission folder. {reason}" in err) == bool(reason)
