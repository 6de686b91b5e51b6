"""LiteLLM and vLLM's router with the text of `connect` and stub servers (`make clients`; PyPI)."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spark_deploy.cli.connection import Connection
from spark_deploy.cli.routers import ROUTERS

pytestmark = pytest.mark.timeout(1800)  # installs packages
PACKAGES = {"litellm": "litellm[proxy]==1.108.7", "vllm-router": "vllm-router==0.1.17"}


class Server(ThreadingHTTPServer):
    """A gateway's paths and key, with a model that always answers its host's name."""

    def __init__(self, name, key, key_file):
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.key, self.available, self.requests = name, key, True, 0
        key_file.write_text(key)
        url = f"http://127.0.0.1:{self.server_port}/v1"
        self.connection = Connection(
            name, url, self.server_port, "", "model", ("model", "alias"), str(key_file),
            f"cat '{key_file}'", None, None, None, "",
        )  # fmt: skip
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(body)

    def answer(self, body=None):
        status, document = 404, {}
        if not self.server.available:
            status = 503
        elif self.path == "/health":
            status = 200
        elif self.headers["Authorization"] != f"Bearer {self.server.key}":
            status = 401
        elif self.path == "/v1/chat/completions" and body["model"] in ("model", "alias"):
            self.server.requests += 1
            message = {"role": "assistant", "content": self.server.name}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "model"}
            status, document = 200, {**answer, "choices": [choice], "usage": usage}
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    home = tmp_path_factory.mktemp("routers")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    subprocess.run([home / "bin/pip", "install", "--quiet", *PACKAGES.values()], check=True)
    return home / "bin"


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def running(command, programs, tmp_path, port):
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    process = subprocess.Popen(
        ["bash", "-euc", command], env=environment, cwd=tmp_path, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def chat(port, key, model="model", **headers):
    fields = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}]}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), fields)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code


def test_litellm_distributes_over_hosts_with_their_own_keys(programs, tmp_path, port):
    servers = [Server(f"spark-{n}", f"key-of-spark-{n}-0123", tmp_path / f"key{n}") for n in (1, 2)]
    text = "\n".join(ROUTERS["litellm"].text([server.connection for server in servers]))
    (tmp_path / "litellm.yaml").write_text(text)
    exports = "\n".join(line[2:] for line in text.splitlines() if line.startswith("# export "))
    key = "sk-of-litellm"
    serve = f"exec litellm --host 127.0.0.1 --port {port} --config litellm.yaml"
    command = f"{exports}\nexport LITELLM_MASTER_KEY={key}\n{serve}"
    with running(command, programs, tmp_path, port):
        answers = Counter(chat(port, key, model) for model in ("model", "alias") * 15)
        assert set(answers) == {"spark-1", "spark-2"}
        assert chat(port, "sk-wrong") in (400, 401)
        servers[0].available = False
        assert {chat(port, key) for _ in range(6)} == {"spark-2"}


def test_vllm_router_keeps_conversations_and_passes_on_the_key(programs, tmp_path, port):
    key = "shared-key-0123456789"
    servers = [Server(f"spark-{n}", key, tmp_path / f"key{n}") for n in (1, 2)]
    [line] = ROUTERS["vllm-router"].text([server.connection for server in servers])
    with running(f"exec {line} --port {port}", programs, tmp_path, port):
        hosts = [
            {chat(port, key, **{"X-Session-Id": f"chat-{n}"}) for _ in range(3)} for n in range(12)
        ]
        assert all(len(answers) == 1 for answers in hosts)
        assert set.union(*hosts) == {"spark-1", "spark-2"}
        assert chat(port, "wrong") == 401
