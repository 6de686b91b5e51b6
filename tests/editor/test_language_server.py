"""Completion and diagnostics of our YAML by the real language server (`make editor`; needs npm).

The first line of each file names the schema.
"""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from spark_deploy.cli.models import schema_line
from spark_deploy.config.checkout import CHECKOUT

VERSION = "1.25.0"
CAPABILITIES = {"textDocument": {"completion": {"completionItem": {"snippetSupport": True}}}}
FOLDERS = ("group_vars", "catalog", "schema")


class Editor:
    def __init__(self, server, root):
        self.root, self.count = root, 0
        self.process = subprocess.Popen(
            [str(server), "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.request("initialize", processId=None, rootUri=root.as_uri(), capabilities=CAPABILITIES)
        self.notify("initialized")

    def notify(self, method, **params):
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def request(self, method, **params):
        self.count += 1
        self._send({"jsonrpc": "2.0", "id": self.count, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("id") == self.count and "method" not in message:
                assert "error" not in message, message
                return message["result"]

    def open(self, path, text=None):
        file = self.root / path
        text = file.read_text() if text is None else text
        document = {"uri": file.as_uri(), "languageId": "yaml", "version": 1, "text": text}
        self.notify("textDocument/didOpen", textDocument=document)
        while True:
            message = self._read()
            params = message.get("params", {})
            is_report = message.get("method") == "textDocument/publishDiagnostics"
            if is_report and params["uri"] == file.as_uri():
                return [item["message"] for item in params["diagnostics"]]

    def complete(self, path, text):
        path = path.replace(".yml", f"-{self.count}.yml")
        self.open(path, text)
        lines = text.split("\n")
        answer = self.request(
            "textDocument/completion",
            textDocument={"uri": (self.root / path).as_uri()},
            position={"line": len(lines) - 1, "character": len(lines[-1])},
        )
        return {item["label"] for item in answer["items"]}

    def _send(self, message):
        body = json.dumps(message).encode()
        assert self.process.stdin
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def _read(self):
        assert self.process.stdout
        length = 0
        while line := self.process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        message: dict[str, Any] = json.loads(self.process.stdout.read(length))
        if "method" in message and "id" in message:
            items = message["params"].get("items", []) if message.get("params") else []
            self._send({"jsonrpc": "2.0", "id": message["id"], "result": [None] * len(items)})
        return message


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("npm")
    npm = shutil.which("npm")
    assert npm, "needs npm: apt-get install npm"
    args = ["install", "--no-audit", "--no-fund", f"yaml-language-server@{VERSION}"]
    subprocess.run([npm, *args], cwd=home, check=True, capture_output=True)
    return home / "node_modules/.bin/yaml-language-server"


@pytest.fixture
def editor(server, tmp_path):
    for folder in FOLDERS:
        shutil.copytree(CHECKOUT / folder, tmp_path / folder)
    (tmp_path / "host_vars").mkdir()
    editor = Editor(server, tmp_path)
    yield editor
    editor.process.kill()
    editor.process.wait()


def schema_comment(path):
    first = (CHECKOUT / path).read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    return first + "\n"


def shipped():
    files = [*CHECKOUT.glob("group_vars/*.yml"), *CHECKOUT.glob("catalog/**/*.yml")]
    return sorted(str(file.relative_to(CHECKOUT)) for file in files)


def test_editor_reports_no_error_in_shipped_files(editor):
    assert len(shipped()) > 12
    assert {path: errors for path in shipped() if (errors := editor.open(path))} == {}


@pytest.mark.parametrize("path", ["group_vars/spark.yml", "host_vars/spark-1.yml"])
def test_editor_completes_settings(editor, path):
    head = schema_comment("group_vars/spark.yml")
    assert {"model", "profile", "serve", "keep_ready", "schedule"} <= editor.complete(path, head)
    assert {"port", "expose"} <= editor.complete(path, head + "serve:\n  ")
    assert {"lan", "tailscale"} <= editor.complete(path, head + "serve:\n  expose: ")
    assert {"at", "model"} <= editor.complete(path, head + "schedule:\n  - ")


@pytest.mark.parametrize(
    ("path", "like", "keys"),
    [
        ("catalog/models/mine.yml", "catalog/models/lab-tiny.yml", {"summary", "sources"}),
        ("catalog/profiles/mine.yml", "catalog/profiles/v2.yml", {"summary", "limits"}),
    ],
)
def test_editor_completes_keys_of_model_and_profile_files(editor, path, like, keys):
    assert keys <= editor.complete(path, schema_comment(like))


def test_editor_completes_and_checks_files_written_by_init(server, tmp_path):
    args = ["init", str(tmp_path), "--host", "spark-1=192.0.2.1", "--host", "b", "--user", "ann"]
    subprocess.run([sys.executable, "-m", "spark_deploy", *args], check=True, cwd=CHECKOUT)
    editor = Editor(server, tmp_path)
    try:
        assert (editor.open("hosts.yml"), editor.open("group_vars/all.yml")) == ([], [])
        hosts = (tmp_path / "hosts.yml").read_text()
        assert {"address", "user"} <= editor.complete("hosts.yml", hosts + "  spark-2:\n    ")
        run = [sys.executable, "-m", "spark_deploy", "use", "agent", "b"]
        subprocess.run([*run, "inventory/spark.py"], check=True, cwd=tmp_path)
        own = (tmp_path / "host_vars/b.yml").read_text()
        assert {"memory", "serve"} <= editor.complete("host_vars/b.yml", own)
        for schema, key in (("profiles/x", "limits"), ("models/x", "sources")):
            path = f"catalog/{schema}.yml"
            name = schema.partition("s/")[0]
            assert {key} <= editor.complete(path, schema_line(tmp_path, tmp_path / path, name))
        wrong = hosts.replace("address", "adress")
        assert any("adress" in text for text in editor.open("wrong.yml", wrong))
    finally:
        editor.process.kill()
        editor.process.wait()


def test_editor_marks_unknown_keys_and_invalid_values(editor):
    head = schema_comment("group_vars/spark.yml")
    wrong = editor.open("group_vars/spark.yml", head + "profil: v2\nserve: {port: 70000}\n")
    assert any("profil" in text for text in wrong), wrong
    assert any("65535" in text for text in wrong), wrong
