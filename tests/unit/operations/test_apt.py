"""No package of driver, kernel or firmware ever changes because of us."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path

import pytest

from spark_deploy.config.settings.sources import RepositorySettings
from spark_deploy.hosts import gpu, packages
from spark_deploy.hosts.commands import CommandFailed
from spark_deploy.hosts.operations import Refused
from tests.unit.facts.test_facts import lines_of
from tests.unit.shell import install_stub, run_script


@pytest.mark.parametrize(
    "package",
    [
        "nvidia-driver-580-open",
        "nvidia-dkms-580",
        "libnvidia-compute-580:arm64",
        "nvidia-firmware-580-580.142",
        "cuda-drivers-580",
        "linux-image-6.17.0-1021-nvidia",
        "linux-modules-nvidia-580-open-6.17.0-1021-nvidia",
        "linux-nvidia-hwe-24.04",
        "nvidia-fabricmanager-580",
        "dgx-release",
        "fwupd",
    ],
)
def test_an_installation_that_would_change_the_driver_set_is_seen(package: str) -> None:
    simulation = [
        "Reading package lists...",
        f"Inst {package} [1.0] (1.1 repo [arm64])",
        f"Conf {package} (1.1 repo [arm64])",
    ]
    assert packages.forbidden_changes(simulation) == (package,)
    assert packages.forbidden_changes([f"Remv {package} [1.0]"]) == (package,)


@pytest.mark.parametrize(
    "package",
    [
        "nvidia-container-toolkit",
        "nvidia-container-toolkit-base",
        "libnvidia-container1",
        "libnvidia-container-tools",
        "cuda-toolkit-13-0",
        "cuda-nvcc-13-0",
        "linux-libc-dev",
        "docker.io",
    ],
)
def test_toolkits_may_be_installed(package: str) -> None:
    assert packages.forbidden_changes([f"Inst {package} (1.0 repo [arm64])"]) == ()


def repository(**changes) -> RepositorySettings:
    given = {
        "name": "vendor",
        "url": "https://packages.example.test/cuda",
        "suite": "stable",
        "components": ("main", "extra"),
        "key_url": "https://packages.example.test/key.asc",
        "key_sha256": "ab" * 32,
    }
    return RepositorySettings(**{**given, **changes})


def test_a_source_is_bound_to_its_own_key() -> None:
    lines = packages.sources_file(repository()).content.decode().splitlines()
    assert "Signed-By: /etc/apt/keyrings/spark-vendor.asc" in lines
    assert "Components: main extra" in lines


def test_a_flat_repository_has_no_components() -> None:
    assert b"Components" not in packages.sources_file(repository(suite="./", components=())).content


def test_a_binary_key_gets_the_suffix_apt_reads_it_by() -> None:
    assert packages.key_path(repository(key_url="https://x.example.test/a.gpg")).endswith(".gpg")


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        ("docker-run--unknown-runtime--03.txt", "not registered"),
        ("docker-run--unknown-runtime-old--05.txt", "not registered"),
        ("docker-run--no-device-driver--04.txt", "no driver for GPUs"),
        ("docker-run--cdi-unresolvable--02.txt", "through CDI"),
        ("docker-run--cdi-mode-gpus-flag--01.txt", "forced to CDI"),
        ("docker-logs--exec-format-error--01.txt", "another architecture"),
        ("nvidia-smi--driver-library-mismatch--01.txt", "module and the installed library"),
        ("nvidia-smi--no-driver--01.txt", "no line starting with GPU"),
    ],
)
def test_each_way_a_container_misses_the_gpu_has_its_own_words(capture: str, words: str) -> None:
    output = "\n".join(lines_of({"capture": capture}))
    problem = gpu.explain_gpu_error(output, "image@sha256:00")
    assert words in problem.what
    assert problem.fix


STUB = """
echo "$(basename $0) $*" >>LOG
case "$*" in *FragmentPath*) echo "OWNED" ;; esac
"""


@pytest.mark.parametrize(
    ("unit", "ours"),
    [
        ("", True),
        ("/run/systemd/generator.late/nginx.service", True),
        ("/etc/systemd/system/nginx.service", False),
        ("/usr/lib/systemd/system/nginx.service", False),
    ],
)
def test_a_service_of_the_owner_is_neither_masked_nor_disabled(tmp_path, unit: str, ours: bool):
    units, tools, log = tmp_path / "units", tmp_path / "bin", tmp_path / "log"
    units.mkdir()
    tools.mkdir()
    for name in ("systemctl", "apt-get"):
        install_stub(tools, name, STUB.replace("LOG", str(log)).replace("OWNED", unit))
    if not ours:
        (units / "nginx.service").write_text("[Service]\n")
    script = packages._install_script("nginx-light", ["nginx.service"])
    run_script(script.replace("/etc/systemd/system", str(units)), tools)
    assert (units / "nginx.service").exists() is not ours
    said = log.read_text()
    assert "install nginx-light" in said
    assert ("systemctl disable nginx.service" in said) is ours


@pytest.mark.parametrize(
    ("said", "http", "https"),
    [
        ("http_proxy='http://p:3128'", "http://p:3128", ""),
        ("http_proxy='http://p:1'\nhttps_proxy='http://p:2'", "http://p:1", "http://p:2"),
        ("http_proxy='DIRECT'", "", ""),
        ("", "", ""),
    ],
)
def test_keys_come_through_the_proxy_that_apt_was_told(tmp_path, said, http, https):
    install_stub(tmp_path, "apt-config", f"cat <<'E'\n{said}\nE")
    show = "env | grep -E '^https?_proxy=' | sort || :"
    lines = run_script(f"set -eu\n{packages._APT_PROXY}\n{show}", tmp_path)
    found = dict(line.split("=", 1) for line in lines)
    assert (found.get("http_proxy", ""), found.get("https_proxy", "")) == (http, https)


@pytest.mark.parametrize(
    ("apt_get", "said"),
    [
        ("sleep 60", "E: not finished after 1 s"),
        ("echo E: no such host; exit 100", "E: no such host"),
        ("exit 0", ""),
    ],
)
def test_lists_that_cannot_be_had_hold_no_run_up_for_ever(
    tmp_path: Path, apt_get: str, said: str
) -> None:
    install_stub(tmp_path, "apt-get", apt_get)
    lines = run_script(packages.update_script(1, str(tmp_path)), tmp_path)
    assert "\n".join(lines).startswith(said)


def test_lists_that_a_power_cut_left_empty_are_fetched_again(tmp_path: Path) -> None:
    # Seen in the lab: apt took an empty list for current and did not know the package.
    lists = tmp_path / "lists"
    (lists / "partial").mkdir(parents=True)
    for name in ("lock", "torn_Packages", "whole_Packages", "partial/begun"):
        (lists / name).write_text("Package: a\n" if name.startswith("whole") else "")
    install_stub(tmp_path, "apt-get", f"ls {lists}")
    assert run_script(packages.update_script(1, str(lists)), tmp_path) == [
        "lock",
        "partial",
        "whole_Packages",
    ]
    assert (lists / "partial/begun").exists()


def test_a_repository_that_answers_503_is_asked_again_at_once() -> None:
    # apt 2.6 counts the pause before it asks again, and then never asks.
    assert " -o Acquire::Retries=1 -o Acquire::Retries::Delay=false " in packages.update_script()


def test_a_package_that_is_nowhere_is_told_with_what_could_not_be_fetched(monkeypatch) -> None:
    asked: list[str] = []

    class Said:
        def log(self, line: str) -> None:
            asked.append(line)

    def run(host: object, command: str, *, timeout_s: int = 600) -> list[str]:
        if " update " in command:
            return ["Hit:1 http://ours", "Err:2 http://vendor ./ InRelease", "W: 403  Forbidden"]
        raise CommandFailed(command, "E: Unable to locate package toolkit")

    monkeypatch.setattr(packages, "run", run)
    monkeypatch.setattr(packages, "wait_for_lock", lambda *_: None)
    monkeypatch.setattr(packages, "heartbeat", lambda *_: nullcontext())
    with pytest.raises(Refused) as caught:
        inspect.unwrap(packages._install)(None, Said(), ("toolkit",), 1, ())
    *_, located, source, status, fix = str(caught.value).splitlines()
    assert "Unable to locate package toolkit" in located
    assert source.strip() == "apt-get update: Err:2 http://vendor ./ InRelease"
    assert status.strip() == "apt-get update: W: 403  Forbidden"
    assert fix.strip().startswith("fix: ")
    assert len(asked) == 2
