"""The demo says what it takes before it takes it, and needs Python alone until then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab import cgroup, demo
from lab.engine.patch import _unloaded
from lab.errors import LabError
from tests.labkit import CHECKOUT


def test_what_goes_on_beside_the_environment_needs_python_alone() -> None:
    program = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); import lab.cli, lab.hub.server"
    # Isolated and without site: not even what this environment has.
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


@pytest.mark.parametrize("engine", ["stub", "cpu"])
def test_it_says_disk_time_packages_and_the_way_back(
    engine: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A disk of a known size: what is free on the machine that tests is no fact about the demo.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40 * 10**9))
    demo.say_what_it_takes(tmp_path / "lab", engine)
    said = capsys.readouterr().out
    for words in ("disk ", "GB in all", "40 GB free", "time ", "packages ", "make lab-purge"):
        assert words in said
    assert not (tmp_path / "lab").exists()


def test_a_disk_that_is_too_full_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(LabError, match=r"1.0 GB free, 18.0 GB needed"):
        demo.say_what_it_takes(tmp_path / "lab", "cpu")


def test_the_processors_time_is_read_from_both_kinds_of_cgroups(tmp_path: Path) -> None:
    one, two = tmp_path / "v1", tmp_path / "v2"
    (one / "cpuacct" / cgroup.TREE).mkdir(parents=True)
    (one / "cpuacct" / cgroup.TREE / "cpuacct.usage").write_text("2500000000\n")
    (two / cgroup.TREE).mkdir(parents=True)
    (two / "cgroup.controllers").write_text("cpu\n")
    (two / cgroup.TREE / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert (cgroup.cpu_s(one), cgroup.cpu_s(two)) == (2.5, 1.5)
    assert cgroup.cpu_s(tmp_path) == 0.0


def test_make_says_it_then_prepares_beside_the_environment_and_then_runs(tmp_path: Path) -> None:
    """With programs in the place of Python that note what they are called with."""
    (tmp_path / "Makefile").write_text((CHECKOUT / "Makefile").read_text())
    noted = tmp_path / "noted"
    for name in ("bin/python3", ".venv/bin/python"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {noted}\n')
        path.chmod(0o755)
    for name in ("requirements/dev.txt", "pyproject.toml", ".venv/installed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    subprocess.run(["make", "demo-fast"], cwd=tmp_path, env=env, check=True, capture_output=True)
    assert noted.read_text().splitlines() == [
        "bin/python3 -m lab demo --engine stub --say",
        "bin/python3 -m lab prepare --engine none",
        ".venv/bin/python -m lab demo --engine stub --said",
    ]


@pytest.mark.parametrize(
    ("flags", "loaded"),
    [
        ({"avx2"}, "_C_AVX2"),
        ({"avx2", "avx512f"}, "_C_AVX512"),
        ({"avx2", "avx512f", "avx512_bf16"}, "_C"),
    ],
)
def test_the_engine_keeps_the_operators_that_this_processor_loads(
    flags: set[str], loaded: str
) -> None:
    left_out = _unloaded(flags)
    assert len(left_out) == 2
    assert f"vllm/{loaded}.abi3.so" not in left_out
