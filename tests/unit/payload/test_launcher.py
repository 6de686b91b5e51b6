"""The command that starts the host tools: root runs our code and nobody else's."""

import os
import subprocess
from pathlib import Path

import pytest

from spark_deploy.hosts.payload import read_payload


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return the tools as they lie on a host, `current` pointing at them."""
    for file in read_payload().tools:
        path = tmp_path / "tools" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(file.mode)
    return tmp_path / "tools"


@pytest.mark.parametrize("name", ["json.py", "secrets.py", "spark_host/__init__.py"])
def test_the_tools_run_no_code_of_the_folder_they_are_called_from(
    tools: Path, tmp_path: Path, name: str
) -> None:
    home = tmp_path / "home"
    planted = home / name
    planted.parent.mkdir(parents=True)
    planted.write_text("raise SystemExit('code of a stranger')\n")

    done = subprocess.run(
        [tools / "bin/spark-host", "help"], cwd=home, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(home)},
    )  # fmt: skip

    assert "stranger" not in done.stderr
    assert done.stderr.startswith("spark-host status")
    assert done.returncode == 0


def test_what_the_tools_start_in_python_is_as_careful(tools: Path) -> None:
    launcher = (tools / "bin/spark-host").read_text()
    child = "import os, sys; sys.exit(not (sys.flags.safe_path and os.getcwd() == '/'))"
    script = launcher.replace("-m spark_host", f'-c "{child}"')

    assert subprocess.run(["sh", "-c", script], check=False, cwd=tools).returncode == 0


def test_the_tools_know_the_folder_they_are_called_from_as_they_work_in_another(
    tools: Path, tmp_path: Path
) -> None:
    launcher = (tools / "bin/spark-host").read_text()
    child = "import os; print(os.environ['SPARK_CALLED_FROM'])"
    script = launcher.replace("-m spark_host", f'-c "{child}"')
    folder = tmp_path / "a folder"
    folder.mkdir()
    said = subprocess.run(["sh", "-c", script], check=True, cwd=folder, capture_output=True)
    assert said.stdout.decode().strip() == str(folder)
