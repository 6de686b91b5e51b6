"""The lab's parts that need no guest."""

import argparse
import dataclasses
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from lab import (
    archive,
    cgroup,
    distribution,
    faults,
    guest,
    hardware,
    packages,
    paths,
    servers,
    shell,
)
from lab.archive import OS_ARCHIVE, VENDOR_ARCHIVE
from lab.boot import boot_argv, nspawn_argv, nspawn_environment
from lab.cli import _parser
from lab.content import cached, content_key
from lab.errors import LabError
from lab.guest import Guest
from lab.paths import LabPaths, guest_names, lab_paths
from lab.record import host_key, known_hosts_lines


def test_a_number_means_the_first_guests_and_a_name_means_itself():
    assert guest_names(["2"]) == ["lab-1", "lab-2"]
    assert guest_names(["2", "lab-2", "lab-4"]) == ["lab-1", "lab-2", "lab-4"]
    assert guest_names(["0"]) == []


@pytest.mark.parametrize("word", ["spark-1", "lab-", "lab-0", "lab-41", "lab-x", "../lab-1"])
def test_other_names_are_refused(word):
    with pytest.raises(LabError, match="not a guest's name"):
        guest_names([word])


def test_the_state_never_lies_under_tmp(monkeypatch):
    monkeypatch.setenv("SPARK_LAB_DIR", "/tmp/lab")
    with pytest.raises(LabError, match="under /tmp"):
        lab_paths()


def test_a_content_key_follows_names_bytes_and_the_executable_bit(tmp_path):
    (tmp_path / "a").write_text("1")
    first = content_key("x", trees=[tmp_path])
    assert content_key("x", trees=[tmp_path]) == first
    (tmp_path / "a").chmod(0o755)
    assert content_key("x", trees=[tmp_path]) != first
    assert content_key("y", trees=[tmp_path]) != content_key("x", trees=[tmp_path])


def test_a_half_made_piece_is_made_again(tmp_path):
    calls = []

    def make(target: Path, *, fail: bool) -> None:
        calls.append(target)
        target.mkdir()
        if fail:
            raise LabError("x", "y", "z")

    with pytest.raises(LabError):
        cached(tmp_path / "piece", lambda target: make(target, fail=True))
    assert not (tmp_path / "piece").exists()
    assert cached(tmp_path / "piece", lambda target: make(target, fail=False)).is_dir()
    cached(tmp_path / "piece", lambda target: make(target, fail=True))
    assert len(calls) == 2


def test_the_gpu_is_in_the_hardware_tree_as_a_spark_shows_it(tmp_path):
    hardware.write_tree(tmp_path)
    gpu = tmp_path / "usr/lib/labstub/pci-devices/000f:01:00.0"
    assert (gpu / "vendor").read_text() == "0x10de\n"
    assert (gpu / "device").read_text() == "0x2e12\n"
    assert (gpu / "class").read_text() == "0x030000\n"
    assert (gpu / "config").read_bytes()[:4] == bytes.fromhex("de10122e")
    version = (tmp_path / "usr/lib/labstub/proc-driver/nvidia/version").read_text()
    assert hardware.DRIVER_VERSION in version


@pytest.mark.parametrize("name", [*packages.PREINSTALLED_STUBS, *packages.VENDOR_STUBS])
def test_every_stand_in_says_so_in_its_version(name):
    control = packages.stub_control(name)
    assert control["Package"] == name
    assert control["Version"].endswith("+labstub")


def nvidia_smi(*words: str) -> subprocess.CompletedProcess[str]:
    program = packages.STUBS_DIR / "nvidia-utils-580/usr/bin/nvidia-smi"
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def test_the_stand_in_answers_queries_as_captured_from_a_spark():
    fields = "name,memory.total,memory.used,driver_version"
    with_header = nvidia_smi(f"--query-gpu={fields}", "--format=csv").stdout
    assert with_header == (
        "name, memory.total [MiB], memory.used [MiB], driver_version\n"
        f"NVIDIA GB10, [N/A], [N/A], {hardware.DRIVER_VERSION}\n"
    )
    plain = nvidia_smi("--query-gpu=name,compute_cap", "--format=csv,noheader").stdout
    assert plain == "NVIDIA GB10, 12.1\n"
    assert nvidia_smi("-L").stdout.startswith("GPU 0: NVIDIA GB10 (UUID: GPU-")
    assert "NVIDIA GB10" in nvidia_smi().stdout
    assert len({len(line) for line in nvidia_smi().stdout.splitlines()[1:] if line}) == 1


def test_a_field_the_real_tool_does_not_know_is_refused():
    answer = nvidia_smi("--query-gpu=name,colour", "--format=csv")
    assert answer.returncode == 2
    assert '"colour" is not a valid field' in answer.stdout


def test_cgroups_of_v1_are_found_without_their_aliases(tmp_path):
    for name in ("cpu", "pids", "systemd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("")
    (tmp_path / "cpuacct").symlink_to("cpu")
    assert not cgroup.is_v2(tmp_path)
    assert [path.name for path in cgroup.hierarchies(tmp_path)] == ["cpu", "pids", "systemd"]


def test_cgroups_of_v2_are_one_hierarchy(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.procs").write_text("")
    assert cgroup.is_v2(tmp_path)
    assert cgroup.hierarchies(tmp_path) == [tmp_path]


def v2_tree(root: Path, *names: str) -> None:
    """Files as the kernel would show them; the machine's own root offers more than we hand down."""
    for directory in (root, *(root / name for name in names)):
        directory.mkdir(exist_ok=True)
        (directory / "cgroup.controllers").write_text("cpu memory rdma\n")
        (directory / "cgroup.procs").write_text("")


def handed_down(root: Path) -> dict[str, str]:
    files = root.rglob("cgroup.subtree_control")
    return {str(file.parent.relative_to(root)): file.read_text() for file in files}


def test_on_v2_controllers_are_handed_down_to_a_guest_but_not_by_a_cgroup_with_processes(tmp_path):
    v2_tree(tmp_path, "lab", "lab/lab-3", "lab/lab-3/watch")
    assert cgroup.seat("lab-3", "watch", tmp_path) == "lab-3/watch"
    cgroup.create("lab-3/watch", tmp_path)
    assert handed_down(tmp_path) == dict.fromkeys((".", "lab", "lab/lab-3"), "+cpu +memory")


def test_on_v1_a_guests_processes_share_the_cgroup_that_the_guest_sees(tmp_path):
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids/cgroup.procs").write_text("")
    assert cgroup.seat("lab-3", "watch", tmp_path) == "lab-3"
    cgroup.create("lab-3", tmp_path)
    assert (tmp_path / "pids/lab/lab-3").is_dir()
    assert handed_down(tmp_path) == {}


def test_a_container_whose_top_cgroup_holds_processes_is_named_as_the_reason(tmp_path):
    v2_tree(tmp_path, "lab")
    (tmp_path / "cgroup.subtree_control").mkdir()  # the kernel's refusal is an OSError too
    with pytest.raises(
        LabError, match=r"(?s)cannot hand [+]cpu [+]memory down.*not in a container"
    ):
        cgroup.create("host", tmp_path)


def test_nspawn_stands_in_the_machines_own_tree_on_v2_and_in_a_namespace_on_v1():
    guest = Guest(LabPaths(Path("/lab")), "lab-2")
    assert "-C" in boot_argv(guest, v2=False)
    assert "-C" not in boot_argv(guest, v2=True)


@pytest.mark.parametrize(
    ("pkgnames", "wanted"),
    [
        ("docker.io\ndocker-registry\n", ("docker.io",)),
        ("docker-buildx\ndocker.io\ndocker-cli\n", ("docker.io", "docker-cli", "docker-buildx")),
    ],
)
def test_the_container_engine_is_whole_where_its_client_is_a_package_of_its_own(
    monkeypatch, pkgnames, wanted
):
    monkeypatch.setattr(packages, "run", lambda argv: pkgnames)
    assert packages.docker_packages() == wanted


def test_a_guest_is_shown_its_own_cgroup_tree_on_v1_only():
    guest = Guest(LabPaths(Path("/lab")), "lab-2")
    on_v1 = nspawn_argv(guest, guest.home / "cg2")
    assert "--bind=/lab/guests/lab-2/cg2:/sys/fs/cgroup" in on_v1
    assert "--bind=/lab/guests/lab-2/disk/docker:/var/lib/docker" in on_v1
    assert not any("/sys/fs/cgroup" in word for word in nspawn_argv(guest, None))
    assert nspawn_environment(v2=True)["SYSTEMD_NSPAWN_UNIFIED_HIERARCHY"] == "1"


def test_every_fault_that_can_be_switched_off_is_also_on_the_command_line():
    parser = _parser()
    for name in faults.FAULTS:
        options = parser.parse_args(["break", name, "lab-1", "--heal"])
        assert isinstance(options, argparse.Namespace)
        assert options.what == name


def test_a_fault_of_a_guest_wants_its_name(tmp_path):
    with pytest.raises(LabError, match="needs a guest"):
        faults.apply(LabPaths(tmp_path), "disk-full", None, value=0, match="*", times=0, heal=False)


def test_a_power_cut_is_not_healed_by_a_switch(tmp_path):
    with pytest.raises(LabError, match="lab up"):
        faults.apply(
            LabPaths(tmp_path), "kill-guest", "lab-1", value=0, match="*", times=0, heal=True
        )


needs_repository_tools = pytest.mark.skipif(
    not all(shutil.which(name) for name in ("apt-ftparchive", "gpg", "dpkg-deb")),
    reason="needs apt-ftparchive, gpg and dpkg-deb",
)


@needs_repository_tools
def test_a_repository_is_signed_by_its_own_key_and_lists_its_packages(tmp_path):
    state = LabPaths(tmp_path)
    deb = packages.build_stub(state, "dgx-release")
    for one in (OS_ARCHIVE, VENDOR_ARCHIVE):
        archive.publish(state, one, [deb], "amd64")
    root = state.apt / "os"
    listing = (root / "dists/lab/main/binary-amd64/Packages").read_text()
    assert "Package: dgx-release\n" in listing
    release = (root / "dists/lab/InRelease").read_text()
    assert "BEGIN PGP SIGNED MESSAGE" in release
    assert "Codename: lab\n" in release
    assert archive.key_sha256(state, OS_ARCHIVE) != archive.key_sha256(state, VENDOR_ARCHIVE)


@needs_repository_tools
def test_an_unchanged_repository_is_not_written_again(tmp_path):
    state = LabPaths(tmp_path)
    deb = packages.build_stub(state, "dgx-release")
    archive.publish(state, OS_ARCHIVE, [deb], "amd64")
    before = (state.apt / "os/dists/lab/InRelease").stat().st_mtime_ns
    archive.publish(state, OS_ARCHIVE, [deb], "amd64")
    assert (state.apt / "os/dists/lab/InRelease").stat().st_mtime_ns == before


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
def test_a_new_hosts_key_is_known_only_once_a_bootstrap_recorded_it(
    key, bootstrap, recorded, expected
):
    found = known_hosts_lines("10.77.0.11", "lab-1", key, bootstrap=bootstrap, recorded=recorded)
    assert found == expected


def test_addresses_are_those_the_documentation_names():
    assert [paths.guest_ip(index) for index in (1, 4)] == ["10.77.0.11", "10.77.0.14"]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace and changes its root")
def test_entering_a_guest_leads_to_its_root_though_the_lab_itself_runs_in_a_chroot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a guest of such a lab: a root that is not at the top of its mount namespace.
    script = (
        f"mount --bind {tmp_path} {tmp_path} && cd {tmp_path} && mkdir usr && touch ours && "
        "mount --bind /usr usr && ln -s usr/bin usr/lib usr/lib64 . && "
        "exec chroot . sh -c 'echo up; exec sleep 60'"
    )
    with subprocess.Popen(
        ["unshare", "-m", "--", "sh", "-c", script], stdout=subprocess.PIPE, text=True
    ) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == "up\n"
        monkeypatch.setattr(guest, "leader_pid", lambda _: inside.pid)
        argv = guest.enter_argv(guest.Guest(LabPaths(tmp_path), "lab-1"), ["ls", "/"])
        seen = subprocess.run(argv, capture_output=True, text=True, check=False)
        inside.kill()
    assert "ours" in seen.stdout.split(), seen


def test_a_program_that_takes_long_is_named_from_time_to_time(monkeypatch, capfd):
    monkeypatch.setattr(shell, "SAY_SOMETHING_EVERY_S", 0.1)
    said = shell.run(["sh", "-c", "cat; sleep 0.5; echo end"], stdin="given\n")
    assert said == "given\nend\n"
    assert capfd.readouterr().err.count("  sh: 0 s\n") >= 2


def test_what_a_program_says_is_passed_on_when_asked(capfd):
    with pytest.raises(LabError, match="exit status 3"):
        shell.run(["sh", "-c", "echo phase=train step=1 >&2; exit 3"], show=True)
    assert capfd.readouterr().err == "phase=train step=1\n"


def test_a_pid_that_went_to_another_server_is_not_taken_for_this_one(monkeypatch, tmp_path):
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


def test_a_registry_that_its_package_started_makes_room_for_the_labs_own(monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(distribution, "run", ran.append)
    there = {
        name: f"/usr/bin/{name}" for name in distribution.PROGRAMS if name != "docker-registry"
    }
    monkeypatch.setattr(distribution.shutil, "which", lambda name, path: there.get(name))
    monkeypatch.setattr(distribution.os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        distribution.Path, "is_dir", lambda path: str(path) == "/run/systemd/system"
    )
    assert distribution.install_programs() == ["docker-registry"]
    assert ran[-1] == ["systemctl", "disable", "--now", "docker-registry.service"]
    monkeypatch.setattr(distribution.Path, "is_dir", lambda path: False)
    distribution.install_programs()
    assert ran[-1][0] == "apt-get"


def test_a_port_that_another_program_has_is_named_before_a_server_starts(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        registry = servers.SERVERS["registry"]
        taken = dataclasses.replace(registry, port=other.getsockname()[1], ip="127.0.0.1")
        monkeypatch.setitem(servers.SERVERS, "registry", taken)
        with pytest.raises(LabError, match=rf"another program listens on port {taken.port}"):
            servers.start(LabPaths(tmp_path), "registry")


def test_a_guest_whose_disk_cannot_be_read_has_no_key_and_stops_no_other(tmp_path):
    one = Guest(LabPaths(tmp_path), "lab-2")
    key = one.disk / "upper/etc/ssh/ssh_host_ed25519_key.pub"
    key.parent.mkdir(parents=True)
    assert host_key(one) is None
    key.mkdir()  # any error of the kernel's, as after a power cut under it
    assert host_key(one) is None
    key.rmdir()
    key.write_text("ssh-ed25519 AAAA root@lab\n")
    assert host_key(one) == "ssh-ed25519 AAAA"
