"""Tools that come with the question run from memory and leave nothing on a host."""

import subprocess

from spark_deploy.hosts.payload import memory_command, packed_tools


def run(*words, cwd):
    return subprocess.run(
        ["sh", "-c", memory_command(*words)],
        input=packed_tools(), capture_output=True, text=True, cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "/nowhere", "SPARK_ROOT": str(cwd)},
    )  # fmt: skip


def test_the_tools_run_without_being_there_and_leave_no_file(tmp_path):
    done = run("help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "spark-host manifest" in done.stderr
    assert list(tmp_path.rglob("*")) == []


def test_a_mistake_is_one_line_that_says_where_and_how_to_mend_it(tmp_path):
    done = run("manifest", "{}", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: manifest: cannot be read: models_dir: missing; fix:")


def test_the_python_of_the_folder_it_is_run_in_is_not_used(tmp_path):
    for name in ("spark_host", "base64", "tarfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('theirs')")
    assert run("help", cwd=tmp_path).returncode == 0
