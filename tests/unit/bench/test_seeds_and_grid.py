import json
import subprocess
import sys
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from results import BENCHY, KEY, serving
from spark_contract import tool
from spark_contract.documents import to_json

from spark_deploy.bench import host, protocols
from spark_deploy.bench.protocols import Endpoint, Grid, measure_answer
from spark_deploy.bench.result import Sample
from spark_deploy.config.errors import SparkError
from tests.unit.planning.plans import plan_of
from tests.unit.statuses import host_status


class Model(BaseHTTPRequestHandler):
    requests: list[dict[str, Any]]
    has_usage = True

    def do_POST(self):
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self.send_error(401)
            return
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        chunks: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": text}}]} for text in ("one ", "two ", "three")
        ]
        if self.has_usage:
            usage = {"prompt_tokens": 7, "completion_tokens": 11}
            chunks.append({"choices": [], "usage": usage})
        for chunk in chunks:
            time.sleep(0.05)
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *words):
        pass


@pytest.fixture
def model():
    handler = type("Handler", (Model,), {"requests": []})
    with serving(handler) as handler.url:
        yield handler


def endpoint(model, key=KEY):
    return Endpoint(model.url, "m", key)


def test_token_counts_come_from_the_usage_block(model):
    answer = measure_answer(endpoint(model), "?", 99)
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 11)
    assert 0.05 <= answer.first_token_s < answer.wall_s
    [body] = model.requests
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 99, True)


def test_rejects_an_answer_without_usage_block(model):
    model.has_usage = False
    with pytest.raises(SparkError, match="no usage block"):
        measure_answer(endpoint(model), "?", 9)


def test_error_of_a_rejected_request_does_not_contain_the_key(model):
    wrong = endpoint(model, "sk-wrong-key")
    with pytest.raises(SparkError, match="returned HTTP 401") as error:
        measure_answer(wrong, "?", 9)
    assert "sk-wrong-key" not in f"{error.value}{wrong!r}"


@pytest.mark.slow
def test_seed_prompts_run_twice_and_fill_at_most_half_the_context(model, monkeypatch):
    monkeypatch.setattr(host, "TICK_S", 0.05)
    notes: list[str] = []
    answers = list(protocols.measure_seeds(endpoint(model), 1000, notes.append))
    names = ["Q&A", "code", "JSON", "math", "long code"]
    assert [(a.run, a.prompt) for a in answers] == [(n, name) for n in (1, 2) for name in names]
    assert [body["max_tokens"] for body in model.requests[:5]] == [256, 500, 500, 64, 500]
    assert notes[0] == "seeds, run 1, Q&A: 0 s"
    assert sum("tok/s" in note for note in notes) == 10


def test_parses_a_recorded_result_of_llama_benchy():
    data = json.loads(BENCHY.read_text())
    version, cells = protocols.parse_cells(data)
    assert version == "0.4.0"
    assert [cell.case for cell in cells] == [(0, 1), (0, 2), (512, 1), (512, 2)]
    assert all((cell.prompt_tokens, cell.generated_tokens) == (256, 64) for cell in cells)
    first = next(case for case in data["benchmarks"] if not case["is_context_prefill_phase"])
    assert cells[0].decode_tokens_per_s == round(first["tg_throughput"]["mean"], 3)
    assert None in [cell.decode_tokens_per_s for cell in cells]


def test_llama_benchy_reads_the_key_from_its_environment(tmp_path):
    package = tmp_path / "llama_benchy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, pathlib, sys\n"
        "def main():\n"
        "    command = pathlib.Path('/proc/self/cmdline').read_text()\n"
        f"    assert sys.argv[1:3] == ['--api-key', {KEY!r}], sys.argv\n"
        f"    assert {KEY!r} not in command and 'SPARK_BENCH_KEY' not in os.environ\n"
        "    out = sys.argv[sys.argv.index('--save-result') + 1]\n"
        f"    pathlib.Path(out).write_text(pathlib.Path({str(BENCHY)!r}).read_text())\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    server = Endpoint("http://127.0.0.1:1/v1", "m", KEY)
    file = tmp_path / "out.json"
    result = protocols.measure_grid(str(python), server, tmp_path, Grid(), file, [])
    assert (result[0], len(result[1])) == ("0.4.0", 4)


def test_bench_skips_depths_beyond_the_context():
    grid = Grid().limited_to(32768)
    assert (grid.depths, grid.concurrencies) == ((0, 4096, 8192, 16384), (1, 2, 5, 10))


def test_bench_parses_samples_with_and_without_gpu_values():
    lines = ["10.5 1000 62,48.21", "11.5 900 [N/A],[N/A]", "12.5 800", "13.5", ""]
    assert list(host.parse_samples(lines)) == [
        Sample(0.0, 1_024_000, 62.0, 48.21),
        Sample(1.0, 921_600, None, None),
        Sample(2.0, 819_200, None, None),
    ]


def test_bench_reads_the_cpus_and_portable_mode_of_the_release(monkeypatch):
    release = plan_of("large", "v2", **{"engine.cpuset_cpus": "5-9,15-19"}).release
    release = replace(release, check=replace(release.check, portable=True))
    status = host_status({"services": {"main": {"active": release.name}}}).report
    outputs = {tool.command_line(tool.STATUS): to_json(status), host.SYSTEM_SCRIPT: ""}
    monkeypatch.setattr(host.Login, "run", lambda _, script: outputs.get(script, to_json(release)))
    served, _ = host.read_served(host.Login("spark-1", (), False), "main")
    assert (served.portable, served.cpus) == (True, "5-9,15-19")
    assert served.invalid_reason.endswith("Not valid for a Spark.")


def test_error_of_a_failed_command_names_host_and_reason():
    login = host.Login("spark-9", (sys.executable, "-c", "import sys; sys.exit('no route')"), True)
    with pytest.raises(SparkError, match="spark-9: no route"):
        login.run("true")


def test_error_for_an_unresponsive_host_names_the_host():
    with pytest.raises(SparkError, match="spark-9: "):
        host.Login("spark-9", (), False).run("sleep 60", timeout_s=0.1)


def test_reads_gpu_and_cuda_from_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n[ $# = 0 ] && echo '| Driver Version: 580.95  CUDA Version: 13.0  |' || "
        "echo NVIDIA GB10\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    lines = host.Login("@local", (), False).run(host.SYSTEM_SCRIPT).splitlines()
    assert {"gpu=NVIDIA GB10", "cuda=13.0"} <= set(lines)


def test_local_commands_use_no_ssh():
    login = host.Login("@local", (), False)
    assert login.run("echo $((6*7))") == "42\n"
    assert Path(subprocess.check_output(login.argv("command -v sh"), text=True).strip()).exists()
