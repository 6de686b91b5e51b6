"""Nothing that root will run passes through a name in /tmp that a user of the host can foresee."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.hosts.files import encode_lines, unzip_script

# What of pyinfra uploads through ``/tmp/pyinfra-HASH`` when it works with sudo.
_UPLOADS = {"FileUploadCommand", "put_file", "put", "template", "rsync", "sync", "script"}
PROGRAM = b"print('ours')\n" * 20_000


def packed() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        out.writestr("package/__init__.py", PROGRAM)
    return buffer.getvalue()


def received(home: Path, content: bytes, sha256: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", unzip_script(str(home), sha256, "made of this")],
        input=encode_lines(content), capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_what_was_sent_stands_there_with_its_receipt_and_nothing_beside_it(tmp_path: Path) -> None:
    home, content = tmp_path / "tools/site", packed()
    for _ in range(2):  # again over one that is there
        done = received(home, content, hashlib.sha256(content).hexdigest())
        assert done.returncode == 0, done.stderr
        assert (home / "package/__init__.py").read_bytes() == PROGRAM
        assert (home / ".receipt").read_text() == "made of this\n"
        assert os.listdir(home.parent) == ["site"]
        assert stat.S_IMODE(home.stat().st_mode) == 0o755


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_other_bytes_than_those_sent_are_never_opened(tmp_path: Path, kept: int) -> None:
    home, content = tmp_path / "tools/site", packed()
    home.mkdir(parents=True)
    (home / "before").touch()
    done = received(home, content[:kept], hashlib.sha256(content).hexdigest())
    assert done.returncode != 0
    assert "do not match the hash" in done.stderr
    assert os.listdir(home) == ["before"]
    assert os.listdir(home.parent) == ["site"]


def test_no_operation_of_ours_uploads_by_pyinfra_s_names() -> None:
    for room in ("spark_deploy/hosts", "roles", "deploys"):
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyinfra"):
                    taken = {alias.name for alias in node.names} & {*_UPLOADS, "files", "server"}
                    assert not taken, f"{path}: {taken}"
