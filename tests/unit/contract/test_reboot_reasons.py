import os
import subprocess
from types import SimpleNamespace

import pytest
from spark_host.records import versions

from spark_deploy.hosts import gpu, survey
from spark_deploy.hosts.facts import split_sections

RUNNING = "6.17.0-1014-nvidia"
MODULE = "proc/driver/nvidia/version"
LIBRARY = "usr/lib/aarch64-linux-gnu/libnvidia-ml.so."
LOADED = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.142  Release Build  (x)\n"

CASES: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, ""),
    "newer kernel": (
        {f"boot/vmlinuz-{RUNNING}": "", "boot/vmlinuz-6.17.0-1021-nvidia": ""},
        f"kernel 6.17.0-1021-nvidia is installed, but {RUNNING} is running",
    ),
    "only older kernels": (
        {f"boot/vmlinuz-{RUNNING}": "", "boot/vmlinuz-6.17.0-1004-nvidia": ""},
        "",
    ),
    "kernel that preflight advises against": ({"boot/vmlinuz-7.0.0-1019-nvidia": ""}, ""),
    "kernel of another kind": ({"boot/vmlinuz-6.18.0-1-generic": ""}, ""),
    "marked": ({"run/reboot-required": ""}, "/run/reboot-required exists (unknown packages)"),
    "marked for packages": (
        {"run/reboot-required": "", "run/reboot-required.pkgs": "libc6\nlibc6\nbash\n"},
        "/run/reboot-required exists (bash, libc6)",
    ),
    "driver upgraded": (
        {MODULE: LOADED, f"{LIBRARY}580.159.03": "", "run/reboot-required": ""},
        "driver module 580.142 is loaded, but library 580.159.03 is installed",
    ),
    "driver not upgraded": ({MODULE: LOADED, f"{LIBRARY}580.142": "", f"{LIBRARY}1": ""}, ""),
    "driver of the lab": (
        {MODULE: LOADED.replace("580.142", "580.142+labstub"), f"{LIBRARY}580.142+labstub": ""},
        "",
    ),
}


def deploy_reason(root):
    """Run the deploy's commands in a shell, on a host below ``root``."""
    script = (gpu.GPU_SCRIPT + survey.IDENTITY_SCRIPT).replace("uname -r", f"echo {RUNNING}")
    for place in ("/run/", "/boot/", "/proc/driver", "/usr/lib/"):
        script = script.replace(place, f"{root}{place}")
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    sections = split_sections(result.stdout.replace(f"{root}/", "/").splitlines())
    sections.pop("smi")
    return survey.parse_identity(sections, gpu.parse_gpu(sections)).boot.reboot_reason


@pytest.mark.parametrize("case", CASES)
def test_status_and_deploy_report_the_same_reboot_reason(tmp_path, monkeypatch, case):
    files, reason = CASES[case]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=RUNNING))
    assert versions.reboot_pending(tmp_path) == reason
    assert deploy_reason(tmp_path) == reason
