"""LiteLLM and vLLM's router with the text of `connect` and stub servers (`make clients`; PyPI)."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spark_deploy.cli.clients import ROUTERS, Connection
from tests.routers import LITELLM_KEY, chat, port, programs, running

__all__ = ["port", "programs"]

pytestmark = pytest.mark.timeout(1800)  # installs packages


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

    def log_message(self, *arguments):
        pass


def test_litellm_distributes_requests_over_hosts_with_different_keys(programs, tmp_path, port):
    servers = [Server(f"spark-{n}", f"key-of-spark-{n}-0123", tmp_path / f"key{n}") for n in (1, 2)]
    text = "\n".join(ROUTERS["litellm"][1]([server.connection for server in servers]))
    with running("litellm", text, programs, tmp_path, port):
        answers = Counter(chat(port, LITELLM_KEY, model) for model in ("model", "alias") * 15)
        assert set(answers) == {"spark-1", "spark-2"}
        assert chat(port, "sk-wrong") in (400, 401)
        servers[0].available = False
        assert {chat(port, LITELLM_KEY) for _ in range(6)} == {"spark-2"}


def test_vllm_router_keeps_conversations_on_one_host_and_forwards_the_key(programs, tmp_path, port):
    key = "shared-key-0123456789"
    servers = [Server(f"spark-{n}", key, tmp_path / f"key{n}") for n in (1, 2)]
    [line] = ROUTERS["vllm-router"][1]([server.connection for server in servers])

    def hosts_of(conversation, requests=3):
        session = {"X-Session-Id": f"chat-{conversation}"}
        return {chat(port, key, **session) for _ in range(requests)}

    with running("vllm-router", line, programs, tmp_path, port):
        hosts = [hosts_of(n) for n in range(12)]
        assert all(len(answers) == 1 for answers in hosts)
        assert set.union(*hosts) == {"spark-1", "spark-2"}
        assert chat(port, "wrong") == 401
        servers[0].available = False
        assert set.union(*map(hosts_of, range(12))) == {"spark-2"}
