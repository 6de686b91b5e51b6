"""A bench counts what the server says, keeps the key to itself, and shows every protocol apart."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest
from spark_contract import tool
from spark_contract.documents import parse, plain, text_of

from spark_deploy import ticking
from spark_deploy.bench import benchy, host, markdown, page
from spark_deploy.bench import page as seeds
from spark_deploy.bench.load import Endpoint, ask
from spark_deploy.bench.result import Answer, BenchResult, Cell, Published, Sample, Served
from spark_deploy.cli import bench, main
from spark_deploy.cli.hosts import Target
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SparkError
from tests.unit.planning.plans import plan_of
from tests.unit.statuses import told

KEY = "sk-never-shown"
CAPTURED = CHECKOUT / "tests/fixtures/llama-benchy-0.4.0.json"


class Model(BaseHTTPRequestHandler):
    """Streams three pieces for eleven tokens, a while apart, and counts them at the end."""

    asked: list[dict[str, Any]]
    counts = True

    def do_POST(self) -> None:
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self.send_error(401)
            return
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        for piece in ("one ", "two ", "three"):
            time.sleep(0.05)
            self._send({"choices": [{"delta": {"content": piece}}]})
        if self.counts:
            self._send({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 11}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, piece: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def model() -> Iterator[type[Model]]:
    handler = type("Handler", (Model,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.port = server.server_address[1]  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def endpoint(model: Any, key: str = KEY) -> Endpoint:
    return Endpoint(f"http://127.0.0.1:{model.port}/v1", "m", key)


def test_tokens_are_those_of_the_usage_block_and_not_the_pieces_of_the_stream(model):
    timed = ask(endpoint(model), "?", 99)
    assert (timed.prompt_tokens, timed.completion_tokens) == (7, 11)
    assert 0.04 < timed.first_token_s < timed.wall_s
    assert timed.wall_s > 0.14
    [body] = model.asked
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 99, True)


def test_an_answer_that_nobody_counted_is_no_measurement(model):
    model.counts = False
    with pytest.raises(SparkError, match="without counting"):
        ask(endpoint(model), "?", 9)


def test_a_refusal_is_told_and_the_key_is_not(model):
    wrong = endpoint(model, "sk-wrong-key")
    with pytest.raises(SparkError, match="answered 401") as told:
        ask(wrong, "?", 9)
    assert "sk-wrong-key" not in f"{told.value}{wrong!r}"


def test_the_five_prompts_are_asked_twice_and_no_longer_than_the_context_allows(model):
    said: list[str] = []
    answers = list(seeds.measure(endpoint(model), 1000, said.append))
    assert [(one.run, one.prompt) for one in answers[:6]] == [
        (1, "Q&A"), (1, "code"), (1, "JSON"), (1, "math"), (1, "long code"), (2, "Q&A"),
    ]  # fmt: skip
    assert [body["max_tokens"] for body in model.asked[:5]] == [256, 500, 500, 64, 500]
    assert len(said) == len(answers) == 10


def test_a_long_answer_is_not_waited_for_in_silence(model, monkeypatch):
    monkeypatch.setattr(ticking, "EVERY_S", 0.05)
    said: list[str] = []
    next(seeds.measure(endpoint(model), 1000, said.append))
    assert said[0] == "seeds, run 1, Q&A: 0 s"


def test_what_llama_benchy_really_wrote_is_read():
    version, cells = benchy.cells_of(json.loads(CAPTURED.read_text()))
    assert version == "0.4.0"
    assert [(c.depth_tokens, c.concurrency) for c in cells] == [(0, 1), (0, 2), (512, 1), (512, 2)]
    # The passes that only fill the cache are no case.
    assert all(c.prompt_tokens == 256 and c.generated_tokens == 64 for c in cells)
    raw = json.loads(CAPTURED.read_text())["benchmarks"]
    first = next(case for case in raw if not case["is_context_prefill_phase"])
    assert cells[0].decode_tokens_per_s == round(first["tg_throughput"]["mean"], 3)
    # An answer that came in one piece has no speed.
    assert None in [c.decode_tokens_per_s for c in cells]


def test_llama_benchy_gets_the_key_by_its_environment_alone(tmp_path):
    package = tmp_path / "llama_benchy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, os, pathlib, sys\n"
        "def main():\n"
        "    seen = pathlib.Path('/proc/self/cmdline').read_text()\n"
        "    assert sys.argv[1:3] == ['--api-key', 'sk-never-shown'], sys.argv\n"
        "    assert 'sk-never-shown' not in seen and 'SPARK_BENCH_KEY' not in os.environ\n"
        "    out = sys.argv[sys.argv.index('--save-result') + 1]\n"
        f"    pathlib.Path(out).write_text(pathlib.Path({str(CAPTURED)!r}).read_text())\n"
    )
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    launcher.chmod(0o755)
    server = Endpoint("http://127.0.0.1:1/v1", "m", KEY)
    out = tmp_path / "out.json"
    version, cells = benchy.measure(str(launcher), server, tmp_path, benchy.Grid(), out)
    assert (version, len(cells)) == ("0.4.0", 4)


def test_only_depths_that_fit_are_measured():
    grid = benchy.Grid().fitting(32768)
    assert grid.depths == (0, 4096, 8192, 16384)
    assert grid.concurrencies == (1, 2, 5, 10)


def test_samples_are_read_as_far_as_the_host_tells():
    lines = ["10.5 1000 62,48.21", "11.5 900 [N/A],[N/A]", "12.5 800", "13.5", ""]
    assert list(host.read_samples(lines)) == [
        Sample(0.0, 1_024_000, 62.0, 48.21),
        Sample(1.0, 921_600, None, None),
        Sample(2.0, 819_200, None, None),
    ]


def result(profile: str = "v2", speed: float = 50.0, **more: Any) -> BenchResult:
    served = Served("spark-1", f"main-{'0' * 12}", "m", profile, "image", "/srv/tree", {})
    given: dict[str, Any] = {
        "schema_version": 1, "at": "2026-01-01T00:00:00Z", "served": served,
        "answers": tuple(
            Answer("Q&A", run, 256, 9, 256, 0.2, 256 / (speed if run == 2 else 1))
            for run in (1, 2)
        ),
        "cells": (Cell(0, 1, 2048, 128, 3000.0, speed, 0.1, 700.0),),
        "llama_benchy": "0.4.0", "drafted_tokens": 10, "accepted_tokens": 8,
        "samples": (Sample(0, 9_000_000_000, 60, 50), Sample(1, 7_500_000_000, 61, 70)),
        "notes": (),
    }  # fmt: skip
    return BenchResult(**{**given, **more})


def test_what_others_published_of_a_stage_stands_beside_it_with_its_stack_and_not_as_ours():
    theirs = (Published(28.3, "a stack of spring 2026; not measured by this project"),)
    told = markdown.text_of([result("base", published=theirs), result("v2-native")])
    assert "| published by others, not ours | 28.3 | - |" in told
    assert "Published by others: 28.3 of base: a stack of spring 2026; not measured" in told
    assert "published" not in markdown.text_of([result()]).lower()


def test_a_bench_knows_what_was_published_of_the_pair_that_it_measured():
    def of(model: str, profile: str) -> list[float]:
        served = Served("spark-1", f"main-{'0' * 12}", model, profile, "image", "/srv/tree", {})
        one = cast(Target, SimpleNamespace(catalog=read_catalog()))
        return [found.tokens_per_s for found in bench._published(one, served)]

    assert of("qwen3.5-122b", "v2") == [51]  # nor that of three requests
    assert of("qwen3.5-35b", "v2") == [112]
    assert of("qwen3.5-122b", "hybrid-mtp2") == of("unheard-of", "v2") == []


def test_the_first_run_warms_up_and_is_in_no_figure():
    told = markdown.text_of([result()])
    assert "| Q&A 256 | 50.0 |" in told
    assert "| 1.0 |" not in told


def test_two_results_stand_side_by_side_with_the_change():
    told = markdown.text_of([result("v2", 50.0), result("v2-tq", 40.0)])
    assert "| tok/s | v2 | v2-tq |" in told
    assert "| Q&A 256 | 50.0 | 40.0 (-20 %) |" in told
    assert "| 0, 1 | 50.0 | 40.0 (-20 %) |" in told
    assert "| least memory available, GB | 7.5 | 7.5 |" in told
    assert "| drafts accepted | 80% | 80% |" in told


def test_a_comparison_is_titled_by_what_is_shared_and_by_what_differs():
    other = result("v2-tq")
    assert markdown.title_of([result()]) == "m with v2 on spark-1"
    assert markdown.title_of([result(), other]) == "m on spark-1: v2 against v2-tq"
    far = result(served=replace(result().served, host="spark-2"))
    assert markdown.title_of([result(), far]) == "m with v2: v2 on spark-1 against v2 on spark-2"


def test_runs_of_one_profile_are_told_apart_by_their_time():
    later = result(at="2026-02-02T00:00:00Z")
    assert markdown.names_of([result(), later]) == [
        "v2, 2026-01-01T00:00:00Z",
        "v2, 2026-02-02T00:00:00Z",
    ]


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.asked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href")]


def test_the_page_needs_nothing_else_and_takes_no_text_for_markup():
    told = page.page_of([result(notes=("<script>alert(1)</script>",)), result("v2-tq", 40.0)])
    links = Links()
    links.feed(told)
    assert links.asked == []
    assert "script" not in links.tags
    assert "url(" not in told
    assert links.tags.count("svg") == 3
    # A bar for each result of the prompt that was asked.
    assert links.tags.count("rect") == 2


def test_a_result_follows_its_schema_and_comes_back_as_it_was():
    schema = json.loads((CHECKOUT / "schema/bench.schema.json").read_text())
    jsonschema.validate(plain(result()), schema)
    assert parse(BenchResult, text_of(result())) == result()


def test_figures_of_the_virtual_lab_say_that_they_are_none_of_a_spark():
    lab = parse(BenchResult, (CHECKOUT / "tests/fixtures/bench-of-two-protocols.json").read_text())
    said = "Stand-ins: driver 580.159.03+labstub, toolkit 1.19.0+labstub. This says nothing of a "
    assert f"\n\n**{said}Spark.**\n\n" in markdown.text_of([lab])
    assert f"<strong>{said}Spark.</strong>" in page.page_of([lab])
    beside = markdown.text_of([result(), lab])
    assert "nothing of a Spark" not in markdown.text_of([result()])
    assert f"**m with v2 on spark-1: {said}" not in beside
    assert f"**{markdown.names_of([result(), lab])[1]}: {said}Spark.**" in beside


def test_a_release_in_portable_mode_is_measured_as_such(monkeypatch):
    release = plan_of("large", "v2").serve
    release = replace(release, check=replace(release.check, portable=True))
    status = told({"services": {"main": {"active": release.name}}}).told
    said = {tool.line(tool.STATUS): text_of(status), host.SYSTEM: ""}
    monkeypatch.setattr(host.Login, "told", lambda _, script: said.get(script, text_of(release)))
    served, _ = host.served_by(host.Login("spark-1", (), False), "main")
    assert served.portable
    assert served.no_spark == (
        "Portable mode: every layer dequantised. This says nothing of a Spark."
    )


def test_comparing_needs_no_host_and_says_which_file_is_no_result(tmp_path, capsys):
    files = []
    for name, one in (("a", result()), ("b", result("v2-tq", 40.0))):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(text_of(one))
    words = ["bench", "--out", str(tmp_path / "out"), *(f"--compare={file}" for file in files)]
    assert main(words) == 0
    assert "40.0 (-20 %)" in capsys.readouterr().out
    assert (tmp_path / "out/comparison.html").read_text().startswith("<!doctype html>")
    files[1].write_text('{"at": 1}')
    assert main(words) == 1
    assert f"{files[1]}: is not a result of bench" in capsys.readouterr().err


def test_results_of_several_hosts_are_one_document_for_programs(tmp_path, monkeypatch, capsys):
    hosts = [SimpleNamespace(name=name) for name in ("a", "b")]
    monkeypatch.setattr(bench, "select_hosts", lambda options, judged: hosts)
    monkeypatch.setattr(bench, "_measure_host", lambda one, how, out: (result(), one.name))
    assert main(["bench", "--out", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert (tmp_path / "b.md").exists()


def test_a_host_that_cannot_be_asked_is_named():
    login = host.Login("spark-9", (sys.executable, "-c", "import sys; sys.exit('no route')"), True)
    with pytest.raises(SparkError, match="spark-9: no route"):
        login.told("true")


def test_what_a_host_is_made_of_is_told_in_words(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n[ $# = 0 ] && echo '| Driver Version: 580.95  CUDA Version: 13.0  |' || "
        "echo NVIDIA GB10\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = host.Login("@local", (), False).told(host.SYSTEM).splitlines()
    assert {"gpu=NVIDIA GB10", "cuda=13.0"} <= set(said)


def test_commands_on_this_machine_go_through_no_ssh():
    login = host.Login("@local", (), False)
    assert login.told("echo $((6*7))") == "42\n"
    assert Path(subprocess.check_output(login.argv("command -v sh"), text=True).strip()).exists()
