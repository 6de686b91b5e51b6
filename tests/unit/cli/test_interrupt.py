import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import yaml

from spark_deploy.config.checkout import CHECKOUT

INVENTORY = """
from spark_deploy.inventory import hosts_of as _hosts_of
globals().update(_hosts_of(__file__))
"""


@pytest.fixture
def site(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []
        threading.Thread(
            target=lambda: [accepted.append(server.accept()) for _ in range(9)], daemon=True
        ).start()
        (tmp_path / "group_vars").mkdir()
        (tmp_path / "inventory").mkdir()
        (tmp_path / "inventory/spark.py").write_text(INVENTORY)
        host = {"address": "127.0.0.1", "port": server.getsockname()[1], "user": "me"}
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"hosts": {"spark-1": host}}))
        yield tmp_path


def interrupted(site, *words, once):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "spark_deploy", *words],
        cwd=site, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "TERM": "xterm",
             "XDG_CACHE_HOME": str(site / "cache")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    os.close(slave)
    text, sent = "", False
    while True:
        try:
            text += os.read(master, 65536).decode(errors="replace")
        except OSError:
            break
        if not sent and once in text:
            sent = True
            time.sleep(1 if "rollback" in words and "-y" in words else 0.1)
            os.killpg(process.pid, signal.SIGINT)
    os.close(master)
    return process.wait(timeout=20), text


@pytest.mark.slow
def test_an_interrupted_deploy_restores_the_cursor(site):
    code, text = interrupted(site, "rollback", "-y", once="connecting")
    assert code == 130
    assert "interrupted: work on hosts continues" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > 0, "the cursor can be seen again"


@pytest.mark.slow
def test_interrupted_confirmation_changes_nothing(site):
    code, text = interrupted(site, "rotate-key", once="[y/N]")
    assert (code, "no changes made" in text) == (130, True)
    assert "continues" not in text


@pytest.mark.slow
def test_interrupting_a_tunnel_exits_with_zero(site):
    code, text = interrupted(site, "connect", "--tunnel", once="open until Ctrl-C")
    assert (code, "interrupted" in text) == (0, False)
