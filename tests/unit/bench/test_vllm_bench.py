"""`vllm bench serve` runs beside the engine, keeps the key to itself, and counts what came back."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_deploy import ticking
from spark_deploy.bench import host, markdown, page, vllm_bench
from spark_deploy.bench.result import Load
from spark_deploy.bench.vllm_bench import Case
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SparkError
from tests.unit.bench.test_bench import KEY, result
from tests.unit.planning.plans import plan_of

CAPTURED = CHECKOUT / "tests/fixtures/vllm-bench-0.32.0.json"
RELEASE = plan_of("large", "v2").serve
# Stands for docker: notes what it is told, and runs what the container would run.
DOCKER = """#!/bin/sh
printf '%s\\n' "$@" > {here}/docker
while [ "$1" != -c ]; do shift; done
PATH={here}/image:$PATH exec sh -c "$2"
"""
VLLM = """#!{python}
import os, pathlib, shutil, sys
here = pathlib.Path("{here}")
here.joinpath("vllm").write_text(chr(10).join(sys.argv[1:]))
here.joinpath("key").write_text(os.environ["OPENAI_API_KEY"])
print("Serving Benchmark Result")
shutil.copy(here / "saved.json", here / "out.json")
"""
CASE = Case(2, 64, 16)


class Image:
    """A docker whose container is a shell of this machine, with a folder of programs in front."""

    def __init__(self, here: Path, monkeypatch: pytest.MonkeyPatch):
        self.here = here
        self.said: list[str] = []
        (here / "api-key").write_text(f"{KEY}\n")
        self.put("bin/docker", DOCKER.format(here=here))
        self.put("vllm-0.32.0.dist-info/METADATA", "Name: vllm\nVersion: 0.32.0\n")
        monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(here))
        monkeypatch.setattr(vllm_bench, "_OUT", str(here / "out.json"))

    def put(self, name: str, text: str) -> None:
        path = self.here / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def with_vllm(self, **more: Any) -> Image:
        self.put("image/vllm", VLLM.format(here=self.here, python=sys.executable))
        (self.here / "saved.json").write_text(json.dumps(json.loads(CAPTURED.read_text()) | more))
        return self

    def measure(self) -> tuple[str | None, tuple[Load, ...]]:
        login, key = host.Login("here", (), False), str(self.here / "api-key")
        return vllm_bench.measure(login, RELEASE, 8017, key, [CASE], self.said.append)

    def noted(self, name: str) -> list[str]:
        return (self.here / name).read_text().splitlines()


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    return Image(tmp_path, monkeypatch)


def test_what_the_real_program_wrote_is_read():
    found = json.loads(CAPTURED.read_text())
    load = vllm_bench.load_of(found, CASE, seed=7)
    assert (load.requests, load.completed, load.seed) == (20, 20, 7)
    assert load.answered_tokens == found["total_output_tokens"]
    assert load.output_tokens_per_s == round(found["output_throughput"], 3)
    assert load.decode_tokens_per_s == pytest.approx(1000 / found["mean_tpot_ms"], rel=0.01)
    assert load.first_token_ms < load.request_ms


def test_it_asks_the_gateway_with_the_key_that_no_command_line_shows(image):
    version, [load] = image.with_vllm().measure()
    assert (version, load.completed) == ("0.32.0", 20)
    assert image.noted("key") == [KEY]
    assert KEY not in "".join(image.noted("docker") + image.noted("vllm"))
    told = image.noted("vllm")
    assert told[:2] == ["bench", "serve"]
    for option, value in (
        ("--base-url", "http://127.0.0.1:8017"), ("--max-concurrency", "2"),
        ("--num-prompts", "20"), ("--random-input-len", "64"), ("--random-output-len", "16"),
    ):  # fmt: skip
        assert told[told.index(option) + 1] == value


def test_it_says_what_runs_and_goes_on_saying_how_long(image, monkeypatch):
    monkeypatch.setattr(ticking, "EVERY_S", 0.05)
    image.with_vllm()
    slow = (
        (image.here / "image/vllm")
        .read_text()
        .replace("import os,", "import time; time.sleep(0.3); import os,")
    )
    image.put("image/vllm", slow)
    image.measure()
    first, *ticks, last = image.said
    assert first == (
        "vllm-bench, 2 clients: vllm bench serve runs on the host; 23 prompts of 64 tokens, "
        "answers of 16"
    )
    assert ticks[0] == "vllm-bench, 2 clients: 0 s"
    assert "tok/s" in last


def test_its_container_reads_the_tree_and_nothing_more(image):
    image.with_vllm().measure()
    told = image.noted("docker")
    mounts = [told[at + 1] for at, word in enumerate(told) if word == "--mount"]
    assert mounts == [f"type=bind,source={RELEASE.tree.path},target=/model,readonly"]
    assert {"--read-only", "--rm", "NVIDIA_VISIBLE_DEVICES=void"} <= set(told)
    assert told[told.index("--cap-drop") + 1] == "ALL"


def test_an_image_without_it_is_no_failure(image):
    assert image.measure() == (None, ())
    # A stand-in for the engine has not even a shell: docker says 127.
    image.put("bin/docker", "#!/bin/sh\nexit 127\n")
    assert image.measure() == (None, ())


def test_a_run_that_fails_says_its_own_words(image):
    image.put("image/vllm", "#!/bin/sh\necho no such tokenizer >&2\nexit 3\n")
    with pytest.raises(SparkError, match="no such tokenizer"):
        image.measure()


def test_requests_that_failed_are_no_result(image):
    with pytest.raises(SparkError, match="2 of 20 requests failed"):
        image.with_vllm(completed=18).measure()


def test_prompts_leave_room_for_their_answer():
    [case] = vllm_bench.cases_of([], 4096)
    assert (case.concurrency, case.prompt_tokens + case.answer_tokens < 4096) == (1, True)
    assert vllm_bench.Case().fitting(131_072).prompt_tokens == 8192


def test_reports_show_it_under_a_protocol_of_its_own():
    slow = Load(1, 8192, 256, 10, 10, 7, 81_920, 2_560, 40.0, 1_600.0, 25.0, 6_700.0)
    fast = replace(slow, output_tokens_per_s=50.0)
    both = [result(loads=(slow,), vllm="0.32.0"), result("v2-tq", loads=(fast,), vllm="0.32.0")]
    told = markdown.text_of(both)
    assert "## Protocol: vllm-bench" in told
    assert "| 8192, 256, 1: tok/s in all | 40.0 | 50.0 (+25 %) |" in told
    assert "<td>50.0 (+25 %)</td>" in page.page_of(both)
    assert "vllm-bench" not in markdown.text_of([result()])
