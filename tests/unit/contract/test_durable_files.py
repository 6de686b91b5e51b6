import os
import subprocess
from pathlib import Path

import pytest
from spark_contract import files


def test_write_error_names_the_target_file():
    with pytest.raises(OSError, match=r"settings\.yml") as refused:
        files.write_text(Path("/proc/settings.yml"), "")
    assert refused.value.filename == "/proc/settings.yml"


def ended_process():
    done = subprocess.Popen(["true"])
    done.wait()
    return done.pid


def test_removes_temporary_file_of_killed_writer(tmp_path):
    left = tmp_path / f".record.json.{ended_process()}"
    left.write_text("half")
    files.write_text(tmp_path / "record.json", "whole\n")
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_keeps_temporary_files_of_other_writers(tmp_path):
    names = [
        f".record.json.{os.getppid()}", f".other.json.{ended_process()}", ".record.json.note",
        f"record.json.{ended_process()}",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).write_text("theirs")
    files.write_text(tmp_path / "record.json", "whole\n")
    assert {path.name for path in tmp_path.iterdir()} == {"record.json", *names}
