import argparse
import os
import subprocess

import pytest

from lab import cgroup, cli, guest, lifecycle, network
from lab.errors import LabError
from lab.paths import LabPaths
from tests.unit.prerequisites import missing


@pytest.fixture
def paths(tmp_path, monkeypatch):
    monkeypatch.setattr(lifecycle, "down", lambda paths, names, delete: None)
    monkeypatch.setattr(cgroup, "list_trees", list)
    monkeypatch.setattr(network, "leftovers", list)
    state = tmp_path / "lab"
    (state / "cache/model").mkdir(parents=True)
    (state / "cache/model/weights").write_bytes(b"x" * 3_000_000)
    (state / "guests").mkdir()
    (state / "guests/link").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kept").write_text("kept")
    return LabPaths(state)


def purge(paths, *names):
    options = argparse.Namespace(guests=list(names), delete=False, purge=True)
    return cli._down(paths, options)


def test_purge_deletes_the_lab_folder_and_reports_its_size(paths, tmp_path, capsys):
    assert purge(paths) == 0
    assert not paths.state.exists()
    assert (tmp_path / "mine/kept").read_text() == "kept"
    assert f"0.0 GB freed: deleted {paths.state}" in capsys.readouterr().out


def test_purge_keeps_files_below_a_remaining_mount(paths, tmp_path, capsys):
    if os.geteuid() != 0:
        missing("needs root, to mount")
    mount_point = paths.guests / "root"
    mount_point.mkdir()
    subprocess.run(["mount", "--bind", tmp_path / "mine", mount_point], check=True)
    try:
        assert purge(paths) == 1
        assert (tmp_path / "mine/kept").read_text() == "kept"
        assert f"left over: mount {mount_point}" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", mount_point], check=True)
    assert purge(paths) == 0


def test_purge_rejects_guest_names_and_fails_while_another_lab_runs(paths, monkeypatch, tmp_path):
    monkeypatch.undo()
    owner = tmp_path / "owner"
    owner.write_text("/elsewhere/lab")
    monkeypatch.setattr(lifecycle, "_owner_file", lambda: owner)
    monkeypatch.setattr(cgroup, "list_trees", lambda: ["host", "lab-1"])
    monkeypatch.setattr(guest, "power_off", lambda _: 1 / 0)
    with pytest.raises(LabError, match="another lab is running in /elsewhere/lab"):
        purge(paths)
    with pytest.raises(LabError, match="whole lab"):
        purge(paths, "lab-1")
    assert paths.state.exists()
