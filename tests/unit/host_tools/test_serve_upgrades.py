"""A pending reboot is read from files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import stub_host  # noqa: F401 - puts the host tools on the path
from spark_host.records import versions

LOADED = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.142  Release Build  (x)\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="6.17.0-1014-nvidia"))
    for path in ("run", "boot", "proc/driver/nvidia", "usr/lib/aarch64-linux-gnu"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "boot/vmlinuz-6.17.0-1014-nvidia").touch()
    (tmp_path / "boot/vmlinuz-6.17.0-1004-nvidia").touch()
    (tmp_path / "boot/vmlinuz-6.17.0-1099-generic").touch()
    (tmp_path / "proc/driver/nvidia/version").write_text(LOADED)
    (tmp_path / "usr/lib/aarch64-linux-gnu/libnvidia-ml.so.580.142").touch()
    (tmp_path / "usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1").touch()
    return tmp_path


def test_consistent_host_needs_no_reboot(root: Path) -> None:
    assert versions.reboot_pending(root) == ""


def test_newer_kernel_needs_a_reboot(root: Path) -> None:
    (root / "boot/vmlinuz-6.17.0-1021-nvidia").touch()
    assert versions.reboot_pending(root) == (
        "kernel 6.17.0-1021-nvidia is installed, 6.17.0-1014-nvidia is running"
    )


def test_newer_driver_library_needs_a_reboot(root: Path) -> None:
    folder = root / "usr/lib/aarch64-linux-gnu"
    (folder / "libnvidia-ml.so.580.142").rename(folder / "libnvidia-ml.so.580.159.03")
    assert versions.reboot_pending(root) == (
        "driver module 580.142 is loaded, library 580.159.03 is installed"
    )


def test_reboot_marker_names_packages(root: Path) -> None:
    (root / "run/reboot-required").touch()
    (root / "run/reboot-required.pkgs").write_text("libc6\nlibc6\n")
    assert versions.reboot_pending(root) == "/run/reboot-required is set (libc6)"


def test_host_without_driver_needs_no_reboot(tmp_path: Path) -> None:
    assert versions.reboot_pending(tmp_path) == ""
