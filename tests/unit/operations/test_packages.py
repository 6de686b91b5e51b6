import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from spark_deploy.hosts import packages
from spark_deploy.hosts.commands import CommandError
from spark_deploy.hosts.operations import HostError
from tests.unit.operations.fake_host import FakeHost
from tests.unit.operations.test_operations import VENDOR
from tests.unit.shell import install_stub, run_script

PROTECTED = (
    "nvidia-driver-580-open", "nvidia-dkms-580", "libnvidia-compute-580:arm64",
    "nvidia-firmware-580-580.142", "cuda-drivers-580", "linux-image-6.17.0-1021-nvidia",
    "linux-modules-nvidia-580-open-6.17.0-1021-nvidia", "linux-nvidia-hwe-24.04",
    "nvidia-fabricmanager-580", "dgx-release", "fwupd",
)  # fmt: skip
FREE = (
    "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container1",
    "libnvidia-container-tools", "cuda-toolkit-13-0", "cuda-nvcc-13-0", "linux-libc-dev",
    "docker.io",
)  # fmt: skip


def test_fails_only_if_driver_kernel_or_firmware_packages_would_change():
    for package in PROTECTED:
        simulation = ["Reading package lists...", f"Inst {package} [1.0] (1.1 repo [arm64])"]
        assert packages.forbidden_changes(simulation) == (package,)
        assert packages.forbidden_changes([f"Remv {package} [1.0]"]) == (package,)
    assert packages.forbidden_changes([f"Inst {package} (1.0 [arm64])" for package in FREE]) == ()


def test_apt_source_specifies_its_key_and_components():
    repository = replace(VENDOR, suite="stable", components=("main", "extra"))
    text = packages.sources_file(repository).content.decode()
    assert "\nComponents: main extra\nSigned-By: /etc/apt/keyrings/spark-vendor.asc\n" in text
    assert b"Components" not in packages.sources_file(VENDOR).content
    binary = replace(VENDOR, key_url="https://x.example.test/a.gpg")
    assert packages.key_path(binary).endswith(".gpg")


STUB = """
echo "$(basename $0) $*" >>LOG
case "$*" in *FragmentPath*) echo "OWNED" ;; esac
"""


@pytest.mark.parametrize(
    ("unit", "managed"),
    [
        ("", True),
        ("/run/systemd/generator.late/nginx.service", True),
        ("/etc/systemd/system/nginx.service", False),
        ("/usr/lib/systemd/system/nginx.service", False),
    ],
)
def test_service_that_existed_before_the_deploy_stays_enabled(tmp_path, unit, managed):
    units, tools, log = tmp_path / "units", tmp_path / "bin", tmp_path / "log"
    units.mkdir()
    tools.mkdir()
    for name in ("systemctl", "apt-get"):
        install_stub(tools, name, STUB.replace("LOG", str(log)).replace("OWNED", unit))
    if not managed:
        (units / "nginx.service").write_text("[Service]\n")
    script = packages._install_script("nginx-light", ["nginx.service"])
    run_script(script.replace("/etc/systemd/system", str(units)), tools)
    assert (units / "nginx.service").exists() is not managed
    calls = log.read_text()
    assert "install nginx-light" in calls
    assert ("systemctl disable nginx.service" in calls) is managed


@pytest.mark.parametrize(
    ("configuration", "http", "https"),
    [
        ("http_proxy='http://p:3128'", "http://p:3128", ""),
        ("http_proxy='http://p:1'\nhttps_proxy='http://p:2'", "http://p:1", "http://p:2"),
        ("http_proxy='DIRECT'", "", ""),
        ("", "", ""),
    ],
)
def test_apt_keys_are_downloaded_through_the_apt_proxy(tmp_path, configuration, http, https):
    install_stub(tmp_path, "apt-config", f"cat <<'E'\n{configuration}\nE")
    show = "env | grep -E '^https?_proxy=' | sort || :"
    lines = run_script(f"set -eu\n{packages._APT_PROXY}\n{show}", tmp_path)
    proxies = dict(line.split("=", 1) for line in lines)
    assert (proxies.get("http_proxy", ""), proxies.get("https_proxy", "")) == (http, https)


@pytest.mark.parametrize(
    ("apt_get", "output"),
    [
        ("sleep 60", "E: not finished after 1 s"),
        ("echo E: no such host; exit 100", "E: no such host"),
        ("exit 0", ""),
    ],
)
def test_apt_update_is_stopped_after_its_time_limit(tmp_path, apt_get, output):
    install_stub(tmp_path, "apt-get", apt_get)
    lines = run_script(packages.update_script(1, str(tmp_path)), tmp_path)
    assert "\n".join(lines).startswith(output)
    # With a delay apt 2.6 never retries after a 503.
    assert " -o Acquire::Retries=1 -o Acquire::Retries::Delay=false " in packages.update_script()


def test_apt_update_replaces_lists_left_empty_by_a_power_cut(tmp_path):
    # Seen in the lab: apt took an empty list for current and did not know the package.
    lists = tmp_path / "lists"
    (lists / "partial").mkdir(parents=True)
    for name in ("lock", "torn_Packages", "whole_Packages", "partial/begun"):
        (lists / name).write_text("Package: a\n" if name.startswith("whole") else "")
    install_stub(tmp_path, "apt-get", f"ls {lists}")
    lines = run_script(packages.update_script(1, str(lists)), tmp_path)
    assert lines == ["lock", "partial", "whole_Packages"]
    assert (lists / "partial/begun").exists()


def test_missing_package_is_reported_with_the_failed_apt_update(monkeypatch):
    def run(host, command, *, timeout_s=600):
        if " update " in command:
            return ["Hit:1 http://ours", "Err:2 http://vendor ./ InRelease", "W: 403  Forbidden"]
        raise CommandError(command, "E: Unable to locate package toolkit")

    monkeypatch.setattr(packages, "run", run)
    monkeypatch.setattr(packages, "wait_for_lock", lambda *_: None)
    monkeypatch.setattr(packages, "heartbeat", lambda *_: nullcontext())
    host: Any = FakeHost()
    with pytest.raises(HostError) as caught:
        inspect.unwrap(packages._install)(None, host, ("toolkit",), 1, ())
    *_, missing, source, status, fix = str(caught.value).splitlines()
    assert "Unable to locate package toolkit" in missing
    assert source.strip() == "apt-get update: Err:2 http://vendor ./ InRelease"
    assert status.strip() == "apt-get update: W: 403  Forbidden"
    assert fix.strip().startswith("fix: ")
    assert len(host.logs) == 2
