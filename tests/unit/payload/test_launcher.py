import os
import subprocess
from pathlib import Path

import pytest

from spark_deploy.hosts.payload import memory_command, pack_tools, read_payload


@pytest.fixture
def tools(tmp_path):
    for file in read_payload().tools:
        path = tmp_path / "tools" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(file.mode)
    return tmp_path / "tools"


@pytest.mark.parametrize("name", ["json.py", "secrets.py", "spark_host/__init__.py"])
def test_host_tools_never_run_code_in_the_current_directory(tools, tmp_path, name):
    home = tmp_path / "home"
    (home / name).parent.mkdir(parents=True)
    (home / name).write_text("raise SystemExit('code of a stranger')\n")
    result = subprocess.run(
        [tools / "bin/spark-host", "help"], cwd=home, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(home)},
    )  # fmt: skip
    assert result.stderr.startswith("spark-host status")
    assert result.returncode == 0


def test_host_tools_never_use_the_users_python_or_site_packages(tools, tmp_path):
    stranger = tmp_path / "bin/python3"
    stranger.parent.mkdir()
    stranger.write_text("#!/bin/sh\necho code of a stranger >&2\n")
    stranger.chmod(0o755)
    script = "import site; print(site.getusersitepackages())"
    environment = {**os.environ, "PYTHONUSERBASE": str(tmp_path)}
    site = subprocess.run(["/usr/bin/python3", "-c", script], env=environment,
                          capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    Path(site).mkdir(parents=True)
    (Path(site) / "usercustomize.py").write_text("raise SystemExit('code of a stranger')\n")
    environment["PATH"] = f"{stranger.parent}:{environment['PATH']}"
    result = subprocess.run(
        [tools / "bin/spark-host", "help"], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.stderr.startswith("spark-host status")


def test_child_processes_inherit_safe_path_and_the_callers_directory(tools, tmp_path):
    child = (
        "import os, sys; sys.exit(not (sys.flags.safe_path and os.getcwd() == '/'"
        " and os.environ['SPARK_CALLED_FROM'].endswith('/a folder')))"
    )
    script = (tools / "bin/spark-host").read_text().replace("-m spark_host", f'-c "{child}"')
    folder = tmp_path / "a folder"
    folder.mkdir()
    subprocess.run(["sh", "-c", script], check=True, cwd=folder)


def run_from_memory(*arguments, cwd):
    return subprocess.run(
        ["sh", "-c", memory_command(*arguments)],
        input=pack_tools(), capture_output=True, text=True, cwd=cwd, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "/nowhere", "SPARK_ROOT": str(cwd)},
    )  # fmt: skip


def test_temporary_host_tools_run_from_memory_and_leave_no_files(tmp_path):
    result = run_from_memory("help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "spark-host manifest" in result.stderr
    assert list(tmp_path.rglob("*")) == []
    bad = run_from_memory("manifest", "{}", cwd=tmp_path)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: ")
    assert "models_dir: missing; fix:" in bad.stderr


def test_temporary_host_tools_ignore_python_files_in_the_current_directory(tmp_path):
    for name in ("spark_host", "base64", "tarfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of a stranger')")
    assert run_from_memory("help", cwd=tmp_path).returncode == 0
