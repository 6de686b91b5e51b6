"""The interpreters that `.ci/run` and `make pythons` choose."""

import subprocess
from pathlib import Path

import pytest

from spark_deploy.config.checkout import CHECKOUT


def write_python(path: Path, exit_status: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {path}\nexit {exit_status}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("on_path", "in_pyenv", "expected"),
    [(0, 0, "bin/python3.10"), (1, 0, "pyenv/versions/3.10.13/bin/python3"), (1, None, None)],
    ids=["on PATH", "pyenv, whose shim on PATH fails", "none"],
)
def test_finds_an_interpreter_that_runs(tmp_path, on_path, in_pyenv, expected):
    write_python(tmp_path / "bin/python3.10", on_path)
    write_python(tmp_path / "pyenv/versions/3.1.0/bin/python3", 0)
    if in_pyenv is not None:
        write_python(tmp_path / "pyenv/versions/3.10.13/bin/python3", in_pyenv)
    done = subprocess.run(
        [CHECKOUT / "tools/find_python", "3.10"],
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is (expected is not None)
    if expected:
        assert done.stdout.splitlines()[-1] == str(tmp_path / expected)
