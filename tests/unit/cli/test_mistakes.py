"""Mistakes of new users end with an instruction that works, in the real command line."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from spark_deploy.config.checkout import CHECKOUT
from tests import forked
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.cli.ssh_server import Host, serving
from tests.unit.cli.test_add import make_site, publish

pytestmark = pytest.mark.slow
SETTINGS = "model: qwen3.5-122b\nprofile: v2\n"
PLAN = "plan --estimate"
ALL = "group_vars/all.yml"
# A traceback, or a place in our code.
OURS = re.compile(r'Traceback|File "|\.py", line|spark_deploy/\S+\.py|line \d+, in ')


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The folder of a new user, whose home has no key."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    for name in ("SSH_AUTH_SOCK", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home/.ssh").mkdir(parents=True)
    folder = tmp_path / "sparks"
    write(folder, {
        "hosts.yml": "hosts:\n  spark-1: {address: 192.0.2.1, user: me}\n",
        ALL: SETTINGS,
        "inventory/spark.py": "from spark_deploy.inventory import hosts_of as _hosts_of\n\n"
        "globals().update(_hosts_of(__file__))\n",
    })  # fmt: skip
    return folder


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)


def run(folder, words, **environment):
    env = {**os.environ, **environment}
    done = forked.run(("spark_deploy", *words.split()), cwd=folder, env=env)
    text = done.stdout + done.stderr
    assert not OURS.search(text), text
    return done.returncode, text


@dataclass(frozen=True)
class Mistake:
    name: str
    text: str
    words: str = PLAN
    files: Mapping[str, str | None] = field(default_factory=dict)
    folder: str = "."
    code: int = 1
    repair: str = ""
    repaired: Mapping[str, str | None] = field(default_factory=dict)


def settings(text):
    return {ALL: SETTINGS + text}


TYPED = [
    Mistake(
        "init on an existing folder", "add to the file: spark-2: {address: 192.0.2.2, user: me}",
        "init . --host spark-2=192.0.2.2 --user me", repair=f"{PLAN} spark-2",
        repaired={"hosts.yml": "hosts:\n  spark-2: {address: 192.0.2.2, user: me}\n"},
    ),
    Mistake(
        "wrong folder", "add --inventory DIR", folder="..", repair=f"{PLAN} --inventory sparks"
    ),
    Mistake(
        "misspelt engine setting", "did you mean engine.max_model_len?",
        files=settings("engine: {max_modle_len: 65536}\n"),
        repaired=settings("engine: {max_model_len: 65536}\n"),
    ),
    Mistake(
        "misspelt model", "did you mean qwen3.5-122b?",
        files={ALL: SETTINGS.replace("122b", "112b")}, repaired={ALL: SETTINGS},
    ),
    Mistake(
        "model too large for one host", "choose model qwen3.5-122b",
        files={ALL: SETTINGS.replace("122b", "397b")}, repaired={ALL: SETTINGS},
    ),
    Mistake(
        "context too long", "set engine.max_context_tokens to 262144",
        files=settings("engine: {max_context_tokens: 2000000}\n"),
        repaired=settings("engine: {max_context_tokens: 262144}\n"),
    ),
    Mistake(
        "exposed to the world", "loopback, docker, tailscale, lan",
        files=settings("serve: {expose: world}\n"), repaired=settings("serve: {expose: lan}\n"),
    ),
    Mistake(
        "tab in YAML", "write spaces", files=settings("serve:\n\texpose: lan\n"),
        repaired=settings("serve:\n  expose: lan\n"),
    ),
    Mistake(
        "misspelt setting", "did you mean profile?",
        files={ALL: SETTINGS.replace("profile", "profle")}, repaired={ALL: SETTINGS},
    ),
    Mistake(
        "settings of a misspelt host", "did you mean host_vars/spark-1.yml?",
        files={"host_vars/spark1.yml": "profile: agent\n"},
        repaired={"host_vars/spark1.yml": None, "host_vars/spark-1.yml": "profile: agent\n"},
    ),
    Mistake(
        "settings file that ends in .yaml", "write a single file group_vars/all.yml",
        files={ALL: None, "group_vars/all.yaml": SETTINGS},
        repaired={"group_vars/all.yaml": None, ALL: SETTINGS},
    ),
    Mistake(
        "no hub", "add --estimate to work offline", "plan", repair=PLAN,
        files=settings("hub: {endpoint: 'http://127.0.0.1:9'}\n"),
    ),
    Mistake("embedder for a chat profile", "profile: v2 → plain",
            "use jina-embeddings-v5-small", code=0, repair=PLAN),
]  # fmt: skip


@pytest.mark.parametrize("mistake", TYPED, ids=lambda mistake: mistake.name)
def test_suggested_fix_for_each_mistake_works(site, mistake):
    write(site, mistake.files)
    folder = site / mistake.folder
    code, text = run(folder, mistake.words)
    assert (code, mistake.text in text) == (mistake.code, True), text
    if mistake.repair or mistake.repaired:
        write(site, mistake.repaired)
        code, text = run(folder, mistake.repair or mistake.words)
        assert code == 0, text


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "hub") as running:
        yield running


def test_add_accepts_the_url_of_a_hub_page(tmp_path, hub):
    publish(hub, "org/Tiny-Chat")
    folder = make_site(tmp_path / "site", hub)
    code, text = run(folder, f"add {hub.url}/org/Tiny-Chat --inventory sparks.py")
    assert code == 0, text
    assert (folder / "catalog/models/tiny-chat.yml").is_file()


def test_add_asks_to_accept_the_terms_of_a_gated_model(tmp_path, hub):
    def refuse(handler, path, _data):
        assert handler.headers["Authorization"] == "Bearer hf_mine"
        handler.send_response(403)
        handler.send_header("X-Error-Code", "GatedRepo")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    folder = make_site(tmp_path / "site", hub)
    publish(hub, "org/Tiny-Chat")
    hub.fault = refuse
    code, text = run(
        folder, "add org/Tiny-Chat --inventory sparks.py", HF_TOKEN="hf_mine", HF_ENDPOINT=hub.url
    )
    assert code == 1
    assert "accept" in text, text
    assert "hf_mine" not in text
    assert not (folder / "catalog").exists()


def in_terminal(folder, *words, act, launch=("-m", "spark_deploy")):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *launch, *words],
        cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    os.close(slave)
    act(process, "", master)
    text = ""
    while True:
        try:
            text += os.read(master, 65536).decode(errors="replace")
        except OSError:
            break
        act(process, text, master)
    os.close(master)
    assert not OURS.search(text), text
    return process.wait(timeout=20), text


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
def interrupt(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.killpg(0, signal.SIGINT)
sys.addaudithook(interrupt)
runpy.run_module("spark_deploy", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["spark_deploy.cli", "click", "yaml", "pyinfra", "paramiko"])
def test_interrupt_during_startup_prints_one_line(site, module):
    launch = ("-c", INTERRUPTED_IMPORT.format(module=module))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reach(site, silent.getsockname()[1])
        code, text = in_terminal(site, "up", act=lambda *_: None, launch=launch)
    assert code == 130
    assert len(text.strip().splitlines()) == 1, text


INTERRUPTED_THREAD = """
from gevent import monkey
monkey.patch_all()
import sys, threading
from spark_deploy import cli
from spark_deploy.cli import changes
def wait(*_, **__):
    def interrupted():
        raise KeyboardInterrupt
    threading.Thread(target=interrupted).start()
    threading.Event().wait(20)
changes.rollback.callback = lambda *_, **__: cli._run(wait, as_json=False)
sys.exit(cli.main(["rollback"]))
"""


def test_interrupt_in_a_thread_stops_the_command(site):
    program = INTERRUPTED_THREAD
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=site, capture_output=True, text=True, timeout=60)
    assert (result.returncode, OURS.search(result.stderr)) == (130, None), result.stderr


@pytest.mark.parametrize(
    ("words", "once", "code", "shown"),
    [
        ("rollback -y", "connecting", 130, "interrupted: work on hosts continues"),
        ("rotate-key", "[y/N]", 130, "no changes made"),
        ("connect --tunnel", "open until Ctrl-C", 0, "tunnels stay open"),
    ],
)
def test_interrupted_command_reports_whether_work_continues_on_hosts(
    site, monkeypatch, words, once, code, shown
):
    def interrupt(process, text, _terminal):
        if once in text and not interrupts:
            interrupts.append(text)
            time.sleep(1 if "-y" in words else 0.1)
            os.killpg(process.pid, signal.SIGINT)

    interrupts: list[str] = []
    monkeypatch.setenv("TERM", "xterm")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reach(site, silent.getsockname()[1])
        result, text = in_terminal(site, *words.split(), act=interrupt)
    assert (result, shown in text) == (code, True), text
    assert ("interrupted" in text, "continues" in text) == ("-y" in words, "-y" in words)
    if "-y" in words:  # the cursor can be seen again
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > 0


def reach(site, port, key=None):
    host = {"address": "127.0.0.1", "port": port, "user": "me"}
    write(site, {"hosts.yml": yaml.safe_dump({"hosts": {"spark-1": host}})})
    if key:
        line = f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n"
        write(site.parent, {"home/.ssh/known_hosts": line})


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """An agent with the only key; yield the public key in base64."""
    path, key = tmp_path / "agent", tmp_path / "key"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(key)], check=True)
    while not path.exists():
        time.sleep(0.02)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    subprocess.run(["ssh-add", "-q", str(key)], check=True)
    public = Path(f"{key}.pub").read_text().split()[1]
    key.unlink()
    Path(f"{key}.pub").unlink()
    yield public
    process.terminate()
    process.wait()


def status(folder):
    words = [sys.executable, "-m", "spark_deploy", "status"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_login_uses_a_key_from_the_ssh_agent(site, agent):
    with serving(Host(keys=[agent])) as host:
        reach(site, host.port, host.host_key)
        assert "unreachable" not in status(site)
        host.keys = []
        assert "rejects our SSH key; fix: run `spark-deploy up`" in status(site)


def test_wrong_password_can_be_reentered_twice(site, agent):
    def type_passwords(_process, text, terminal):
        if text.count("sudo): ") > len(typed):
            typed.append(f"wrong{len(typed)}")
            os.write(terminal, f"{typed[-1]}\n".encode())

    typed: list[str] = []
    with serving(Host(password="right")) as host:
        reach(site, host.port, host.host_key)
        code, text = in_terminal(site, "up", act=type_passwords)
    assert code == 1
    assert host.tried == typed == ["wrong0", "wrong1", "wrong2"]
    assert "wrong" not in text.replace("wrong password", "")
    assert "password: rejected by spark-1" in text
