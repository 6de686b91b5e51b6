import os
import subprocess

import pytest

from lab import cgroup, guest, servers
from lab.errors import LabError
from lab.guest import Guest
from lab.paths import LabPaths, lab_paths


def test_lab_rejects_a_state_directory_under_tmp(monkeypatch):  # a guest's systemd may empty /tmp
    monkeypatch.setenv("SPARK_LAB_DIR", "/tmp/lab")
    with pytest.raises(LabError):
        lab_paths()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace and changes its root")
def test_lab_enters_guest_root_even_if_the_lab_runs_in_a_chroot(tmp_path, monkeypatch):
    script = (
        f"mount --bind {tmp_path} {tmp_path} && cd {tmp_path} && mkdir usr && touch marker && "
        "mount --bind /usr usr && ln -s usr/bin usr/lib usr/lib64 . && "
        "exec chroot . sh -c 'echo up; exec sleep 60'"
    )
    with subprocess.Popen(
        ["unshare", "-m", "--", "sh", "-c", script], stdout=subprocess.PIPE, text=True
    ) as inside:
        assert inside.stdout.readline() == "up\n"
        monkeypatch.setattr(guest, "leader_pid", lambda _: inside.pid)
        argv = guest.enter_argv(Guest(LabPaths(tmp_path), "lab-1"), ["ls", "/"])
        listed = subprocess.run(argv, capture_output=True, text=True, check=False)
        inside.kill()
    assert "marker" in listed.stdout.split(), listed


def test_reused_pid_is_not_mistaken_for_a_lab_server(monkeypatch, tmp_path):
    lab = LabPaths(tmp_path)
    lab.run.mkdir()
    arguments = ["sh", "-c", "echo up; read forever", "lab _hub"]
    hub = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert hub.stdout.readline() == b"up\n"
        monkeypatch.setattr(cgroup, "pids", lambda name: {hub.pid})
        for name in ("hub", "registry"):
            (lab.run / f"{name}.pid").write_text(str(hub.pid))
        assert servers.running_pid(lab, "hub") == hub.pid
        assert servers.running_pid(lab, "registry") is None
    finally:
        hub.communicate()
