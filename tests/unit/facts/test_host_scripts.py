"""Scripts of facts, run by a real shell with stand-in programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_deploy.hosts import disk, docker_facts, gpu
from spark_deploy.hosts.downloads import LoginAddress
from spark_deploy.hosts.facts import split_sections
from spark_deploy.hosts.network import NetplanFiles
from spark_deploy.hosts.survey import audit_script, engine_memory_script, parse_audit
from tests.unit.shell import install_stub, run_script


@pytest.mark.parametrize(
    ("variable", "address"),
    [
        ("10.77.0.1 40312 10.77.0.11 22", "10.77.0.11"),
        ("fe80::1%eth0 40312 2001:db8::11 2222", "2001:db8::11"),
        ("", ""),
        ("10.77.0.1 40312", ""),
    ],
)
def test_the_host_s_own_address_of_the_login_is_read(variable: str, address: str) -> None:
    fact = LoginAddress()
    environment = {"SSH_CONNECTION": variable} if variable else {}
    assert fact.process(run_script(fact.command(), **environment)) == address


@pytest.mark.parametrize("complaint", ["", "W: /etc/apt/sources.list.d/dgx.sources: no Release"])
def test_a_complaint_on_the_other_stream_does_not_hide_the_score(
    tmp_path: Path, complaint: str
) -> None:
    script = f'echo "{complaint}" >&2\necho \'{{"name": "OTA2.2", "torn": 2.6}}\''
    install_stub(tmp_path, "nvidia-spark-ota-check", script)
    lines = run_script(f"{gpu.GPU_SCRIPT}\n:", tmp_path)
    assert gpu.parse_gpu(split_sections(lines)).torn_score == 2.6


def test_each_running_engine_is_printed_with_the_need_of_its_release(tmp_path: Path) -> None:
    known, unknown = (f"spark-serve@{name}-0123456789ab.service" for name in ("main", "code"))
    units = f"echo '{known} loaded active'\necho '{unknown} loaded active'"
    install_stub(tmp_path, "systemctl", units)
    release = tmp_path / "main-0123456789ab/release.json"
    release.parent.mkdir()
    release.write_text('{\n "memory": {\n  "wait_s": 60.0,\n  "needed_bytes": 123\n }\n}\n')
    lines = run_script(engine_memory_script(str(tmp_path)), tmp_path)
    assert lines == ["== engine-memory", f"{known} 123", f"{unknown} "]


HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(); input()"
)
AUDIT = """
echo "The following packages are only half configured:"
echo " nginx    small web server"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A database of packages of which one is half installed."""
    (tmp_path / "bin").mkdir()
    install_stub(tmp_path / "bin", "dpkg", AUDIT)
    for lock in ("lock", "lock-frontend"):
        (tmp_path / lock).touch()
    return tmp_path


def half_installed(folder: Path) -> tuple[str, ...]:
    return parse_audit(run_script(f"exec 2>&1\n{audit_script(str(folder))}\n:", folder / "bin"))


def test_what_nobody_installs_is_half_installed(folder: Path) -> None:
    assert half_installed(folder) == ("nginx",)


@pytest.mark.parametrize("lock", ["lock", "lock-frontend"])
def test_what_somebody_installs_right_now_is_not(folder: Path, lock: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / lock)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    assert half_installed(folder) == ()
    holder.communicate("\n")
    assert half_installed(folder) == ("nginx",)


@pytest.mark.parametrize(("status", "in_trial"), [(0, True), (3, False)])
def test_a_restore_that_still_runs_counts_as_a_trial(
    tmp_path: Path, status: int, in_trial: bool
) -> None:
    units = f'[ "$*" = "is-active --quiet spark-fabric-return.service" ] && exit {status}; exit 4'
    install_stub(tmp_path, "systemctl", units)
    fact = NetplanFiles()
    assert fact.process(run_script(fact.command(), tmp_path)).in_trial is in_trial


EXPECTED = "/var/lib/docker"
# Another filesystem than that of /, on every machine.
OTHER = "/dev/shm"


def place(tmp_path: Path, **tools: str) -> disk.Place:
    for name, text in tools.items():
        install_stub(tmp_path, name, text)
    lines = run_script(f"{disk.disk_script([EXPECTED], [EXPECTED])}\n:", tmp_path)
    [place] = disk.parse_places(split_sections(lines)["places"])
    return place


def test_a_docker_that_was_moved_is_followed(tmp_path: Path) -> None:
    one = place(tmp_path, docker=f"echo '{OTHER}/docker|[Backing Filesystem extfs]'")
    assert (one.path, one.folder) == (EXPECTED, f"{OTHER}/docker")
    assert os.path.ismount(one.mount)
    assert one.mount == OTHER


def test_one_that_says_nothing_is_where_it_is_expected(tmp_path: Path) -> None:
    for text in ("exit 1", "echo '|'; exit 1"):
        assert place(tmp_path, docker=text).folder == EXPECTED


@pytest.mark.parametrize("dump", ['version = 2\nroot = "{}"\n', "root = '{}'\nstate = '/run/x'\n"])
def test_the_store_of_containerd_is_where_that_says(tmp_path: Path, dump: str) -> None:
    store = "driver-type io.containerd.snapshotter.v1"
    one = place(
        tmp_path,
        docker=f"echo '{EXPECTED}|[{store}]'",
        containerd=f"cat <<'E'\n{dump.format(OTHER)}\nE",
    )
    assert (one.folder, one.mount) == (OTHER, OTHER)


ANSWER = {
    "docker": '{"ServerVersion": "29.2.1"}',
    "nvidia-smi": "580.142",
    "nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.19.0",
}


def read_docker(folder: Path) -> docker_facts.Docker:
    fact = docker_facts.DockerState()
    return fact.process(run_script(fact.command((), str(folder / "receipt.json")), folder))


def look(folder: Path, monkeypatch: pytest.MonkeyPatch, **delays_s: float) -> docker_facts.Docker:
    """Read a host on which each program sleeps at its first call, and ``docker`` at all."""
    monkeypatch.setattr(docker_facts, "_LIMITS_S", (0.4, 0.9))
    for name, answer in ANSWER.items():
        delay_s = delays_s.get(name.replace("-", "_"), 0)
        asked = folder / f"{name}.asked"
        once = "" if name == "docker" else f"[ -e {asked} ] || "
        answering = f"{once}sleep {delay_s}\ntouch {asked}\ncat <<'END'\n{answer}\nEND"
        install_stub(folder, name, answering)
    return read_docker(folder)


@pytest.mark.slow
def test_a_late_answer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = look(tmp_path, monkeypatch, docker=0.5, nvidia_smi=0.6, nvidia_ctk=0.6)
    assert (seen.info["ServerVersion"], seen.driver_version) == ("29.2.1", "580.142")
    assert seen.toolkit_version == "1.19.0"
    assert seen.silent == ()


@pytest.mark.slow
def test_what_never_answers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = look(tmp_path, monkeypatch, docker=1.2)
    assert seen.info == {}
    assert seen.silent == ("docker",)


def test_what_fails_at_once_is_not_silent(tmp_path: Path) -> None:
    for name in ANSWER:
        install_stub(tmp_path, name, "exit 1")
    assert read_docker(tmp_path).silent == ()
