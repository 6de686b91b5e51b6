"""LiteLLM and vLLM's router from their packages, and requests to them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

PACKAGES = {"litellm": "litellm[proxy]==1.108.7", "vllm-router": "vllm-router==0.1.17"}
LITELLM_KEY = "sk-of-litellm"


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
def running(router, text, programs, tmp_path, port):
    """Start a router with the text that ``connect`` prints for it."""
    command = f"exec {text.strip()} --port {port} --prometheus-port {port + 1}"
    if router == "litellm":
        (tmp_path / "litellm.yaml").write_text(text)
        exports = re.findall("^# (export .*)", text, re.M)
        serve = f"exec litellm --host 127.0.0.1 --port {port} --config litellm.yaml"
        command = "\n".join([*exports, f"export LITELLM_MASTER_KEY={LITELLM_KEY}", serve])
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
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def chat(port, key, model="model", question="Hello.", **headers):
    fields = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    body = {"model": model, "messages": [{"role": "user", "content": question}]}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), fields)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code
