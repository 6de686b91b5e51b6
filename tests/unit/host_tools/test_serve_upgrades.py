"""A pending reboot is detected from files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from spark_host.records import versions

RUNNING, LOADED = "6.17.0-1014-nvidia", "580.142"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host that has rebooted since its last upgrade."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=RUNNING))
    for path in ("run", "boot", "proc/driver/nvidia", "usr/lib/aarch64-linux-gnu"):
        (tmp_path / path).mkdir(parents=True)
    for kernel in (RUNNING, "6.17.0-1004-nvidia", "6.17.0-1099-generic"):
        (tmp_path / f"boot/vmlinuz-{kernel}").touch()
    (tmp_path / "proc/driver/nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {LOADED}  Release Build  (x)\n"
    )
    for version in (LOADED, "1"):
        (tmp_path / f"usr/lib/aarch64-linux-gnu/libnvidia-ml.so.{version}").touch()
    return tmp_path


def test_no_reboot_is_pending(root, tmp_path_factory):
    assert versions.reboot_pending(root) == ""
    without_driver = tmp_path_factory.mktemp("empty")
    assert versions.reboot_pending(without_driver) == ""


def test_newer_kernel_needs_a_reboot(root):
    (root / "boot/vmlinuz-6.17.0-1021-nvidia").touch()
    message = f"kernel 6.17.0-1021-nvidia is installed, {RUNNING} is running"
    assert versions.reboot_pending(root) == message


def test_newer_driver_library_needs_a_reboot(root):
    folder = root / "usr/lib/aarch64-linux-gnu"
    (folder / f"libnvidia-ml.so.{LOADED}").rename(folder / "libnvidia-ml.so.580.159.03")
    message = f"driver module {LOADED} is loaded, library 580.159.03 is installed"
    assert versions.reboot_pending(root) == message


def test_reboot_marker_names_packages(root):
    (root / "run/reboot-required").touch()
    (root / "run/reboot-required.pkgs").write_text("libc6\nlibc6\n")
    assert versions.reboot_pending(root) == "/run/reboot-required is set (libc6)"
