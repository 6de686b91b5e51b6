"""Parts of the lab that protect the machine it runs on, without a guest."""

import dataclasses
import os
import socket
import subprocess

import pytest

from lab import cgroup, guest, servers
from lab.errors import LabError
from lab.guest import Guest
from lab.paths import LabPaths, guest_names, lab_paths
from lab.record import known_hosts_lines


def test_resolves_guest_names():
    assert guest_names(["2"]) == ["lab-1", "lab-2"]
    assert guest_names(["2", "lab-2", "lab-4"]) == ["lab-1", "lab-2", "lab-4"]
    for word in ("spark-1", "lab-", "lab-0", "lab-41", "lab-x", "../lab-1"):
        with pytest.raises(LabError):
            guest_names([word])


def test_refuses_state_under_tmp(monkeypatch):  # a guest's systemd may empty /tmp
    monkeypatch.setenv("SPARK_LAB_DIR", "/tmp/lab")
    with pytest.raises(LabError):
        lab_paths()


def test_container_without_cgroup_delegation_is_an_error(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory rdma\n")
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "cgroup.subtree_control").mkdir()  # writing fails with OSError, as in the kernel
    with pytest.raises(LabError, match="container"):
        cgroup.create("host", tmp_path)


KEY = "ssh-ed25519 AAAA"


@pytest.mark.parametrize(
    ("key", "bootstrap", "recorded", "expected"),
    [
        (KEY, False, [], [f"10.77.0.11 {KEY}", f"lab-1 {KEY}"]),
        (None, False, [], []),
        (KEY, True, [], []),
        (KEY, True, [f"10.77.0.11 {KEY}"], [f"10.77.0.11 {KEY}"]),
        (KEY, True, ["10.77.0.11 ssh-ed25519 BBBB", f"10.77.0.12 {KEY}"], []),
    ],
)
def test_key_of_new_host_is_known_only_after_bootstrap(key, bootstrap, recorded, expected):
    lines = known_hosts_lines("10.77.0.11", "lab-1", key, bootstrap=bootstrap, recorded=recorded)
    assert lines == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace and changes its root")
def test_enters_guest_root_even_if_the_lab_runs_in_a_chroot(tmp_path, monkeypatch):
    script = (
        f"mount --bind {tmp_path} {tmp_path} && cd {tmp_path} && mkdir usr && touch marker && "
        "mount --bind /usr usr && ln -s usr/bin usr/lib usr/lib64 . && "
        "exec chroot . sh -c 'echo up; exec sleep 60'"
    )
    with subprocess.Popen(
        ["unshare", "-m", "--", "sh", "-c", script], stdout=subprocess.PIPE, text=True
    ) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == "up\n"
        monkeypatch.setattr(guest, "leader_pid", lambda _: inside.pid)
        argv = guest.enter_argv(Guest(LabPaths(tmp_path), "lab-1"), ["ls", "/"])
        listed = subprocess.run(argv, capture_output=True, text=True, check=False)
        inside.kill()
    assert "marker" in listed.stdout.split(), listed


def test_reused_pid_is_not_mistaken_for_a_server(monkeypatch, tmp_path):
    lab = LabPaths(tmp_path)
    lab.run.mkdir()
    words = ["sh", "-c", "echo up; read forever", "lab _hub"]
    hub = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert hub.stdout is not None
        assert hub.stdout.readline() == b"up\n"
        monkeypatch.setattr(cgroup, "pids", lambda name: {hub.pid})
        for name in ("hub", "registry"):
            (lab.run / f"{name}.pid").write_text(str(hub.pid))
        assert servers.pid_of(lab, "hub") == hub.pid
        assert servers.pid_of(lab, "registry") is None
    finally:
        hub.communicate()


def test_refuses_to_start_server_on_used_port(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        registry = servers.SERVERS["registry"]
        used = dataclasses.replace(registry, port=other.getsockname()[1], ip="127.0.0.1")
        monkeypatch.setitem(servers.SERVERS, "registry", used)
        with pytest.raises(LabError, match=str(used.port)):
            servers.start(LabPaths(tmp_path), "registry")
