import re
import shutil
import subprocess

import pytest

from spark_deploy.hosts import base

BLOCKED = (
    "nvidia-driver-580-open", "nvidia-firmware-580-580.142", "nvidia-dkms-580-open",
    "libnvidia-compute-580", "xserver-xorg-video-nvidia-580", "cuda-drivers-580",
    "linux-nvidia-hwe-24.04", "linux-image-nvidia-hwe-24.04", "linux-headers-nvidia-hwe-24.04",
    "linux-image-6.17.0-1021-nvidia", "linux-modules-6.17.0-1021-nvidia",
    "linux-modules-nvidia-580-open-nvidia-hwe-24.04", "linux-tools-6.17.0-1021-nvidia",
)  # fmt: skip
ALLOWED = ("openssh-server", "docker-ce", "nginx-light", "linux-libc-dev", "libc6", "python3.12")


@pytest.mark.skipif(shutil.which("apt-config") is None, reason="needs apt-config")
def test_unattended_upgrades_skip_only_driver_and_kernel(tmp_path):
    isolated = 'Dir::Etc::main "/nonexistent"; Dir::Etc::parts "/nonexistent";\n'
    (tmp_path / "apt.conf").write_text(isolated + base.HOLD_FILE.content.decode())
    patterns = subprocess.run(
        ["apt-config", "dump", "--format", "%v%n", "Unattended-Upgrade::Package-Blacklist"],
        capture_output=True, text=True, check=True, env={"APT_CONFIG": str(tmp_path / "apt.conf")},
    ).stdout.split()  # fmt: skip
    assert len(patterns) > 3

    def is_blocked(package):
        return any(re.match(pattern, package) for pattern in patterns)

    assert [package for package in BLOCKED if not is_blocked(package)] == []
    assert [package for package in ALLOWED if is_blocked(package)] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_memory_guarantees(tmp_path):
    units = {"user.slice": "[Slice]\n", "system.slice": "[Slice]\n"}
    units["ssh.service"] = "[Service]\nExecStart=/bin/true\n"
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    for file in base.GUARANTEE_FILES:
        path = tmp_path / file.path.removeprefix("/etc/systemd/system/")
        path.parent.mkdir()
        path.write_bytes(file.content)
    assert {path.name for path in tmp_path.glob("*.d")} == {f"{name}.d" for name in units}
    errors = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in units)],
        capture_output=True, text=True, check=False,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:/lib/systemd/system", "PATH": "/usr/bin:/bin"},
    ).stderr  # fmt: skip
    assert [line for line in errors.splitlines() if "50-spark.conf" in line] == []
