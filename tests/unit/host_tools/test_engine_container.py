import os
import stat
import subprocess
import sys

import pytest
from spark_contract.paths import Paths
from spark_contract.tool import HostToolError
from spark_host.engine import container, serve
from spark_host.records import versions
from spark_host.system import docker
from stub_host import RELEASE, REPOSITORY, write_program

HOSTILE = {
    "LD_PRELOAD": "/cache/evil.so",
    "DOCKER_HOST": "tcp://192.0.2.1:2375",
    "DOCKER_CONFIG": "/cache",
    "GODEBUG": "http2debug=2",
    "HTTPS_PROXY": "http://192.0.2.1",
    "PATH": "/cache",
    "STUB_LOG": 'a value with  spaces, "quotes" and $signs = # ü',
}
SHELL_VARIABLES = {"PWD", "SHLVL", "_", "OLDPWD"}


@pytest.fixture
def client(host, tmp_path):
    return write_program(
        tmp_path / "bin/docker",
        f"env -0 > {tmp_path}/environ; printf '%s\\0' \"$@\" > {tmp_path}/argv\n"
        f'while [ $# -gt 0 ]; do [ "$1" = --env-file ] && cp -p "$2" {tmp_path}/env-file; '
        "shift; done; exit 0",
    )


def client_environment(client):
    text = (client.parent.parent / "environ").read_text()
    variables = dict(line.split("=", 1) for line in text.removesuffix("\0").split("\0"))
    return {name: value for name, value in variables.items() if name not in SHELL_VARIABLES}


def run_engine(host, client):
    host.release(engine__env=HOSTILE)
    done = subprocess.run(
        [sys.executable, "-m", "spark_host", "serve", RELEASE],
        capture_output=True, text=True, check=False,
        env={
            "PYTHONPATH": f"{REPOSITORY}/files/host:{REPOSITORY}/files/contract",
            "SPARK_ROOT": str(host.paths.root),
            "PATH": f"{client.parent}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": "/nowhere", "DOCKER_CONTEXT": "elsewhere",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_docker_client_does_not_get_engine_variables(host, client):
    run_engine(host, client)
    variables = client_environment(client)
    assert set(variables) <= {"HOME", "LC_ALL", "PATH"}
    assert variables["PATH"].endswith(":/usr/bin:/bin")
    argv = (client.parent.parent / "argv").read_text()
    assert "evil.so" not in argv
    assert "quotes" not in argv


def test_container_variables_come_from_a_temporary_root_only_file(host, client, monkeypatch):
    run_engine(host, client)
    file = client.parent.parent / "env-file"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert dict(line.split("=", 1) for line in file.read_text().splitlines()) == HOSTILE
    monkeypatch.setattr(docker, "remove_container", lambda _: None)
    assert host.paths.engine_environment(RELEASE).exists()
    serve.after_stop(RELEASE, host.paths)
    assert not host.paths.engine_environment(RELEASE).exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GOOD", "one\nLD_PRELOAD=/cache/evil.so"),
        ("GOOD", "one\rtwo"),
        ("GOOD", "nul\0"),
        ("A\nB", "x"),
        ("A=B", "x"),
        ("", "x"),
        ("#A", "x"),
        ("GOOD", "x" * 70_000),
    ],
)
def test_rejects_variables_that_break_the_file_format(host, name, value):
    release = host.release(engine__env={name: value})
    with pytest.raises(HostToolError, match="environment"):
        container.write_environment(release, host.paths)
    assert not host.paths.engine_environment(RELEASE).exists()


def test_docker_client_has_a_minimal_environment(client, monkeypatch):
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.defpath}")
    docker.client("stop", "x")
    assert set(client_environment(client)) <= {"HOME", "LC_ALL", "PATH"}


# As `nvidia-ctk cdi generate` writes it, shortened; the link without a version comes first here.
SPECIFICATION = """\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  hooks:
  - args: [nvidia-cdi-hook, create-symlinks, --link, libcuda.so.1::/usr/lib/libcuda.so]
  mounts:
  - hostPath: /usr/lib/aarch64-linux-gnu/libcuda.so.{driver}
"""
NEW, OLD = "580.173.02", "580.159.03"
NVIDIA_CTK = """
echo "$@" >> "$0.calls"
[ -e "$0.broken" ] && exit 1
printf 'kind: nvidia.com/gpu\\nlibcuda.so.580.173.02\\n' > "${3#--output=}"
"""


@pytest.fixture
def nvidia_ctk(tmp_path, monkeypatch):
    program = write_program(tmp_path / "bin/nvidia-ctk", NVIDIA_CTK)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(versions, "read_driver", lambda: NEW)
    return program


def calls(program):
    path = program.with_name("nvidia-ctk.calls")
    return path.read_text() if path.exists() else ""


def write_specification(tmp_path, text, name="nvidia.yaml"):
    path = tmp_path / "etc/cdi" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_regenerates_cdi_spec_once_after_driver_update(tmp_path, nvidia_ctk):
    spec = write_specification(tmp_path, SPECIFICATION.format(driver=OLD))
    reports: list[str] = []
    for _ in range(2):
        container.refresh_cdi(reports.append, Paths(tmp_path))
    assert calls(nvidia_ctk) == f"cdi generate --output={spec}\n"
    assert reports == [
        f"regenerating {spec} for driver {NEW}, because it was made for driver {OLD}"
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SPECIFICATION.format(driver=NEW), "nvidia.yaml"),
        ("kind: vendor.example/net\nlibcuda.so.580.1.1\n", "net.yaml"),
        ("kind: nvidia.com/gpu\nlibcuda.so.1\n", "nvidia.json"),
        (SPECIFICATION.format(driver=OLD), "nvidia.yaml.before"),
    ],
)
def test_keeps_other_cdi_files(tmp_path, nvidia_ctk, text, name):
    spec = write_specification(tmp_path, text, name)
    container.refresh_cdi(pytest.fail, Paths(tmp_path))
    assert (calls(nvidia_ctk), spec.read_text()) == ("", text)


@pytest.mark.usefixtures("nvidia_ctk")
def test_cdi_refresh_without_a_driver_or_folder_does_nothing(tmp_path, monkeypatch):
    container.refresh_cdi(pytest.fail, Paths(tmp_path))
    write_specification(tmp_path, SPECIFICATION.format(driver=OLD))
    monkeypatch.setattr(versions, "read_driver", lambda: "")
    container.refresh_cdi(pytest.fail, Paths(tmp_path))


def test_failed_cdi_refresh_does_not_prevent_the_start(tmp_path, nvidia_ctk):
    nvidia_ctk.with_name("nvidia-ctk.broken").touch()
    spec = write_specification(tmp_path, SPECIFICATION.format(driver=OLD))
    reports: list[str] = []
    container.refresh_cdi(reports.append, Paths(tmp_path))
    assert "to see the error" in reports[-1]
    assert OLD in spec.read_text()
