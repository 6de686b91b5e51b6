import json
import os
import sys

import pytest
from results import KEY

from spark_deploy.bench import host
from spark_deploy.bench.host import LoadCase
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SparkError
from tests.unit.planning.plans import plan_of

RECORDED = CHECKOUT / "tests/fixtures/vllm-bench-0.32.0.json"
RELEASE = plan_of("large", "v2").release
DOCKER = """#!/bin/sh
printf '%s\\n' "$@" > {root}/docker
while [ "$1" != -c ]; do shift; done
PATH={root}/image:$PATH exec sh -c "$2"
"""
VLLM = """#!{python}
import os, pathlib, shutil, sys, time
root = pathlib.Path("{root}")
root.joinpath("vllm").write_text(chr(10).join(sys.argv[1:]))
root.joinpath("key").write_text(os.environ["OPENAI_API_KEY"])
time.sleep(0.3)
print("Serving Benchmark Result")
shutil.copy(root / "saved.json", root / "out.json")
"""
CASE = LoadCase(2, 64, 16)


class Image:
    """A docker that runs containers as local shells."""

    def __init__(self, root, monkeypatch):
        self.root = root
        self.notes: list[str] = []
        (root / "api-key").write_text(f"{KEY}\n")
        self.put("bin/docker", DOCKER.format(root=root))
        self.put("vllm-0.32.0.dist-info/METADATA", "Name: vllm\nVersion: 0.32.0\n")
        monkeypatch.setenv("PATH", f"{root}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(root))
        monkeypatch.setattr(host, "_OUT", str(root / "out.json"))

    def put(self, name, text):
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def with_vllm(self, **changes):
        self.put("image/vllm", VLLM.format(root=self.root, python=sys.executable))
        saved = json.loads(RECORDED.read_text()) | changes
        (self.root / "saved.json").write_text(json.dumps(saved))
        return self

    def measure(self):
        login, key = host.Login("spark-1", (), False), str(self.root / "api-key")
        return host.measure_loads(login, RELEASE, 8017, key, [CASE], self.notes.append)

    def recorded(self, name):
        return (self.root / name).read_text().splitlines()


@pytest.fixture
def image(tmp_path, monkeypatch):
    return Image(tmp_path, monkeypatch)


def test_parses_a_recorded_result_of_vllm_bench():
    data = json.loads(RECORDED.read_text())
    load = host.parse_load(data, CASE, seed=7)
    assert (load.requests, load.completed, load.seed) == (20, 20, 7)
    assert load.answered_tokens == data["total_output_tokens"]
    assert load.output_tokens_per_s == round(data["output_throughput"], 3)
    assert load.decode_tokens_per_s == pytest.approx(1000 / data["mean_tpot_ms"], rel=0.01)
    assert load.first_token_ms < load.request_ms


def test_bench_never_passes_the_key_in_process_arguments(image, monkeypatch):
    monkeypatch.setattr(host, "TICK_S", 0.05)
    version, [load] = image.with_vllm().measure()
    assert (version, load.completed) == ("0.32.0", 20)
    assert image.recorded("key") == [KEY]
    docker, vllm = image.recorded("docker"), image.recorded("vllm")
    assert KEY not in "".join(docker + vllm)
    assert vllm[:2] == ["bench", "serve"]
    options = {
        "--base-url": "http://127.0.0.1:8017", "--max-concurrency": "2", "--num-prompts": "20",
        "--random-input-len": "64", "--random-output-len": "16",
    }  # fmt: skip
    assert {name: vllm[vllm.index(name) + 1] for name in options} == options
    mounts = [docker[at + 1] for at, word in enumerate(docker) if word == "--mount"]
    assert mounts == [f"type=bind,source={RELEASE.tree.path},target=/model,readonly"]
    assert {"--read-only", "--rm", "NVIDIA_VISIBLE_DEVICES=void"} <= set(docker)
    assert docker[docker.index("--cap-drop") + 1] == "ALL"
    assert image.notes[1] == "vllm-bench, 2 clients: 0 s"
    assert "tok/s" in image.notes[-1]


def test_vllm_bench_is_skipped_if_the_image_has_no_vllm(image):
    assert image.measure() == (None, ())
    image.put("bin/docker", "#!/bin/sh\nexit 127\n")
    assert image.measure() == (None, ())


def test_error_of_a_failed_run_is_reported(image):
    image.put("image/vllm", "#!/bin/sh\necho no such tokenizer >&2\nexit 3\n")
    with pytest.raises(SparkError, match="no such tokenizer"):
        image.measure()


def test_failed_requests_invalidate_the_result(image):
    with pytest.raises(SparkError, match="2 of 20 requests failed"):
        image.with_vllm(completed=18).measure()


@pytest.mark.parametrize(("context", "prompt"), [(131_072, 8192), (4096, 4096 - 256 - 64)])
def test_vllm_bench_prompts_leave_room_for_the_answer(context, prompt):
    assert LoadCase().limited_to(context).prompt_tokens == prompt
