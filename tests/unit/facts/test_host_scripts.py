import os
import subprocess
import sys

import pytest
from pyinfra.api.exceptions import FactProcessError
from spark_contract.machine import LIBCUDA

from spark_deploy.hosts import disk, docker_facts, facts, gpu
from spark_deploy.hosts.downloads import LoginAddress
from spark_deploy.hosts.facts import split_sections
from spark_deploy.hosts.network import NetplanFiles
from spark_deploy.hosts.survey import audit_script, engine_memory_script, parse_audit
from tests.unit.shell import install_stub, run_script


def test_script_parts_run_in_parallel_and_print_in_order(tmp_path):
    def meet(mine, other):
        wait = f"for i in $(seq 400); do [ -e {tmp_path}/{other} ] && break; sleep 0.05; done"
        return f"echo '== {mine}'; touch {tmp_path}/{mine}; {wait}; ls {tmp_path}/{other} | wc -l"

    lines = run_script(facts.build_script(meet("a", "b"), parallel=(meet("b", "a"),)))
    assert lines == ["== a", "1", "== b", "1", "== end"]


@pytest.mark.parametrize(
    ("first", "second"), [("kill $$", "echo '== b'"), ("echo '== a'", "exit 1")]
)
def test_incomplete_script_output_is_rejected(first, second):
    script = facts.build_script(f"sh -c '{first}' || exit 1", parallel=(second,))
    with pytest.raises(FactProcessError, match="cut off"):
        facts.parse_sections(run_script(script))


@pytest.mark.parametrize(
    ("sudo", "output"),
    [
        ('shift 2; exec "$@"', ["yes", "ran"]),
        ("exit 1", ["no", "ann", "ran"]),
        ('[ "$3" = true ]', []),
    ],
)
def test_failed_sudo_is_reported_and_the_script_never_runs_twice(sudo, output, tmp_path):
    install_stub(tmp_path, "sudo", sudo)
    install_stub(tmp_path, "id", '[ "$1" = -un ] && echo ann || echo 1000')
    assert run_script(facts.as_root("echo ran"), tmp_path) == ["== sudo", *output]


@pytest.mark.parametrize(
    ("variable", "address"),
    [
        ("10.77.0.1 40312 10.77.0.11 22", "10.77.0.11"),
        ("fe80::1%eth0 40312 2001:db8::11 2222", "2001:db8::11"),
        ("", ""),
        ("10.77.0.1 40312", ""),
        # Other hosts cannot reach these: link-local with a zone, and the end of a tunnel.
        ("fe80::1%eth0 40312 fe80::2%eth0 22", ""),
        ("127.0.0.1 40312 127.0.0.1 22", ""),
        ("::1 40312 ::1 22", ""),
    ],
)
def test_reads_the_host_address_from_the_ssh_connection(variable, address):
    environment = {"SSH_CONNECTION": variable} if variable else {}
    output = run_script(LoginAddress().command(), **environment)
    assert LoginAddress().process(output) == address


@pytest.mark.parametrize("warning", ["", "W: /etc/apt/sources.list.d/dgx.sources: no Release"])
def test_reads_the_ota_torn_score_when_warnings_are_also_printed(tmp_path, warning):
    script = f'echo "{warning}" >&2\necho \'{{"name": "OTA2.2", "torn": 2.6}}\''
    install_stub(tmp_path, "nvidia-spark-ota-check", script)
    lines = run_script(f"{gpu.GPU_SCRIPT}\n:", tmp_path)
    assert gpu.parse_gpu(split_sections(lines)).torn_score == 2.6


def test_reads_only_the_driver_version_of_a_cdi_specification(tmp_path):
    # The hook's link sorts before every version and exists with every driver.
    specification = tmp_path / "nvidia.yaml"
    specification.write_text(
        "    args: [create-symlinks, --link, 'libcuda.so.1::/usr/lib/libcuda.so']\n"
        "  - hostPath: /usr/lib/aarch64-linux-gnu/libcuda.so.580.126.09\n"
        "    containerPath: /usr/lib/aarch64-linux-gnu/libcuda.so.580.126.09\n"
    )
    lines = run_script(f"grep -oE '{LIBCUDA}' {specification}")
    assert set(lines) == {"libcuda.so.580.126.09"}


def test_prints_the_planned_memory_of_each_running_engine(tmp_path):
    known, unknown = (f"spark-serve@{name}-0123456789ab.service" for name in ("main", "code"))
    units = f"echo '{known} loaded active'\necho '{unknown} loaded active'"
    install_stub(tmp_path, "systemctl", units)
    release = tmp_path / "main-0123456789ab/release.json"
    release.parent.mkdir()
    release.write_text('{\n "memory": {\n  "wait_s": 60.0,\n  "needed_bytes": 123\n }\n}\n')
    lines = run_script(engine_memory_script(str(tmp_path)), tmp_path)
    assert lines == ["== engine-memory", f"{known} 123", f"{unknown} "]


LOCK = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(); input()"
)
AUDIT = 'echo "The following packages are only half configured:"; echo " nginx    small web server"'


def read_half_installed(folder):
    return parse_audit(run_script(f"exec 2>&1\n{audit_script(str(folder))}\n:", folder))


@pytest.mark.parametrize("lock", ["lock", "lock-frontend"])
def test_half_installed_packages_are_ignored_while_apt_runs(tmp_path, lock):
    install_stub(tmp_path, "dpkg", AUDIT)
    for name in ("lock", "lock-frontend"):
        (tmp_path / name).touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(tmp_path / lock)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    holder.stdout.readline()
    assert read_half_installed(tmp_path) == ()
    holder.communicate("\n")
    assert read_half_installed(tmp_path) == ("nginx",)


@pytest.mark.parametrize(("status", "in_trial"), [(0, True), (3, False)])
def test_network_restore_in_progress_is_reported_as_an_unconfirmed_change(
    tmp_path, status, in_trial
):
    units = f'[ "$*" = "is-active --quiet spark-fabric-return.service" ] && exit {status}; exit 4'
    install_stub(tmp_path, "systemctl", units)
    lines = run_script(NetplanFiles().command(), tmp_path)
    assert NetplanFiles().process(lines).in_trial is in_trial


DOCKER_DIR = "/var/lib/docker"
OTHER = "/dev/shm"


def read_place(folder, **stubs):
    for name, script in stubs.items():
        install_stub(folder, name, script)
    lines = run_script(f"{disk.disk_script([DOCKER_DIR], [DOCKER_DIR])}\n:", folder)
    [place] = disk.parse_disk_usage(split_sections(lines)["paths"])
    return place


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem")
@pytest.mark.parametrize("options", ["ro", "rw"])
def test_finds_read_only_filesystems(tmp_path, options):
    script = tmp_path / "script"
    mount = f"mount -t tmpfs -o {options} x {OTHER}\n"
    script.write_text(mount + disk.disk_script([f"{OTHER}/a/b"]))
    done = subprocess.run(["unshare", "-m", "sh", script], capture_output=True, text=True)
    sections = split_sections(done.stdout.splitlines())
    assert sections["read-only"] == ([OTHER] if options == "ro" else [])


CONTAINERD_STORE = f"echo '{DOCKER_DIR}|[driver-type io.containerd.snapshotter.v1]'"


@pytest.mark.parametrize(
    ("docker", "containerd", "folder"),
    [
        (f"echo '{OTHER}/docker|[Backing Filesystem extfs]'", "exit 9", f"{OTHER}/docker"),
        (CONTAINERD_STORE, f"cat <<'E'\nversion = 2\nroot = \"{OTHER}\"\n\nE", OTHER),
        (CONTAINERD_STORE, f"cat <<'E'\nroot = '{OTHER}'\nstate = '/run/x'\n\nE", OTHER),
        ("exit 1", "exit 9", DOCKER_DIR),
        ("echo '|'; exit 1", "exit 9", DOCKER_DIR),
    ],
    ids=["data root", "containerd", "quoted", "no answer", "empty answer"],
)
def test_finds_the_docker_image_directory(tmp_path, docker, containerd, folder):
    place = read_place(tmp_path, docker=docker, containerd=containerd)
    assert (place.path, place.folder) == (DOCKER_DIR, folder)
    assert folder == DOCKER_DIR or place.mount == OTHER


OUTPUT = {
    "docker": '{"ServerVersion": "29.2.1"}',
    "nvidia-smi": "580.142",
    "nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.19.0",
}


def read_docker(folder):
    fact = docker_facts.DockerState()
    return fact.process(run_script(fact.command((), str(folder / "receipt.json")), folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delays_s", "silent"),
    [({"docker": 2, "nvidia-smi": 2, "nvidia-ctk": 2}, ()), ({"docker": 9}, ("docker",))],
)
def test_waits_for_slow_programs_and_reports_unresponsive_programs(
    tmp_path, monkeypatch, delays_s, silent
):
    monkeypatch.setattr(docker_facts, "_TIMEOUTS_S", (1.5, 8.0))
    for name, output in OUTPUT.items():
        called = tmp_path / f"{name}.called"
        # Others than docker sleep at the first call only.
        once = "" if name == "docker" else f"[ -e {called} ] || "
        script = f"{once}sleep {delays_s.get(name, 0)}\ntouch {called}\ncat <<'END'\n{output}\nEND"
        install_stub(tmp_path, name, script)
    docker = read_docker(tmp_path)
    assert docker.silent == silent
    assert docker.info.get("ServerVersion") == (None if silent else "29.2.1")
    assert (docker.driver_version, docker.toolkit_version) == ("580.142", "1.19.0")
