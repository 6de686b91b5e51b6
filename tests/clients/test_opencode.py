"""opencode itself, with what `connect` prints, against a real gateway (`make clients`: npm)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.labkit import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "tests/unit/host_tools"))

from stub_gateway import running
from stub_host import Host

from spark_deploy.cli.clients import CLIENTS, Connection

pytest_plugins = ["tests.unit.host_tools.conftest"]
VERSION = "1.18.33"
QUESTION, ANSWER = "What is 7823 * 4519?", "35352137"


@pytest.fixture(scope="module")
def opencode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home, npm = tmp_path_factory.mktemp("npm"), shutil.which("npm")
    assert npm, "needs npm: apt-get install npm"
    words = ["install", "--no-audit", "--no-fund", f"opencode-ai@{VERSION}"]
    subprocess.run([npm, *words], cwd=home, check=True, capture_output=True)
    return home / "node_modules/.bin/opencode"


def test_opencode_answers_through_the_gateway(
    opencode: Path, host: Host, nginx_program: Path, tmp_path: Path
) -> None:
    (host.paths.root / "usr/sbin").mkdir(parents=True)
    (host.paths.root / "usr/sbin/nginx").symlink_to(nginx_program)
    # The stub would call a tool in every answer, and opencode would go on for ever.
    host.started(host.release(), STUB_FAULT="no-tool")
    with running(host, engine=False, max_body_bytes=1 << 22) as door:
        key = host.paths.below(door.settings.key_path)
        connection = Connection(
            "spark-1", f"http://127.0.0.1:{door.settings.port}/v1", "this host", "main-model",
            ("main-model",), str(key), f"cat '{key}'", None, None, None, "", 16_384,
        )  # fmt: skip
        project = tmp_path / "project"
        project.mkdir()
        (project / "opencode.json").write_text("\n".join(CLIENTS["opencode"].text(connection)))
        environment = "\n".join(CLIENTS["env"].text(connection))
        script = f'{environment}\nexec "$0" run "{QUESTION}"'
        done = subprocess.run(
            ["bash", "-euc", script, str(opencode)], cwd=project, timeout=180, check=False,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ANSWER in done.stdout
