"""The demo says what it takes before it takes it, and needs Python alone until then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab import cgroup, demo, room
from lab.engine.build import engine_in
from lab.engine.patch import _unloaded
from lab.errors import LabError
from lab.images import PublishedImage, write_published
from lab.paths import LabPaths
from spark_deploy.cli.hosts import Target, build_plan
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.settings.load import load_hosts
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
    monkeypatch.setattr(demo, "missing_packages", lambda: ["mmdebstrap", "tinyproxy-bin"])
    lab = LabPaths(tmp_path / "some/where/lab")
    demo.say_what_it_takes(lab, engine)
    said = capsys.readouterr().out
    for words in ("disk ", "GB at the end", "  2 hosts", "time ", "make lab-purge"):
        assert words in said
    assert "packages  mmdebstrap tinyproxy-bin\n" in said
    assert ("vLLM, unpacked" in said) == (engine == "cpu")
    assert ("memory    6 GiB for the engines of 2 hosts" in said) == (engine == "cpu")
    assert not lab.state.exists()


@pytest.mark.parametrize("others", [[], ["lab-21"]], ids=["alone", "beside one that is down"])
def test_what_it_says_to_type_next_is_about_its_own_hosts(
    others: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    demo.say_how_to_go_on(others)
    said = capsys.readouterr().out
    assert "spark-deploy connect lab-1 lab-2 --inventory inventory/lab.py" in said
    assert "inventory/lab.py deploy.py --limit lab-1 --limit lab-2 -y" in said
    assert ("python -m lab down --delete lab-21" in said) == bool(others)


def test_the_memory_that_it_names_is_what_the_plan_of_a_host_asks_for() -> None:
    vendor = {"cuda.repositories": [], "docker.repositories": []}  # the lab itself describes it
    found = load_hosts({"lab": ["lab-1"]}, root=CHECKOUT, overrides=vendor)["lab-1"]
    plan = build_plan(Target("lab-1", {}, found, read_catalog()), estimate=True)
    needed = plan.needs.memory_needed_bytes
    assert needed <= room.ENGINE_MEMORY_BYTES < needed + (1 << 28)


def test_a_disk_that_is_too_full_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    lab = LabPaths(tmp_path / "lab")
    wanted = sum(one.size_bytes for one in room.parts(lab, tmp_path, demo.HOSTS, "cpu"))
    monkeypatch.setattr(demo, "CHECKOUT", tmp_path)
    with pytest.raises(LabError, match=rf"1.0 GB free, {wanted / 1e9:.1f} GB needed"):
        demo.say_what_it_takes(lab, "cpu")


def test_what_is_there_of_a_part_need_not_come_again(tmp_path: Path) -> None:
    lab = LabPaths(tmp_path / "lab")

    def to_come(engine: str) -> dict[str, int]:
        found = room.parts(lab, tmp_path, demo.HOSTS, engine)
        return {one.what: one.to_come_bytes for one in found}

    before = to_come("cpu")
    holds(lab.cache / "base-0123456789ab/bin/sh", 3)
    holds(lab.guests / "lab-2/disk.img", 5)
    holds(lab.guests / "lab-9/disk.img", 7)  # of no host of the demo
    after = to_come("cpu")
    gone = {what: before[what] - after[what] for what in before if before[what] != after[what]}
    # Folders take a block or two each.
    assert {what: size >> 20 for what, size in gone.items()} == {
        "packages, and what hosts stand on": 3,
        "2 hosts": 5,
    }


def test_an_engine_counts_as_there_when_it_is_the_one_that_is_wanted(tmp_path: Path) -> None:
    lab = LabPaths(tmp_path / "lab")

    def there() -> list[bool]:
        found = room.parts(lab, tmp_path, demo.HOSTS, "cpu")
        return [one.to_come_bytes == 0 for one in found if one.what.startswith("vLLM")]

    engine = engine_in(lab.cache)
    holds(lab.cache / "engine-venv-of-last-year/bin/vllm", 1)
    holds(engine.rootfs / "bin/sh", 1)
    write_published(lab, [("vllm-cpu", PublishedImage("lab/vllm-cpu", "of-last-year", "sha256:0"))])
    assert there() == [False, False]
    holds(engine.venv / "bin/vllm", 1)
    write_published(lab, [("vllm-cpu", PublishedImage("lab/vllm-cpu", engine.key, "sha256:1"))])
    assert there() == [True, True]


def test_a_file_with_two_names_takes_its_room_once(tmp_path: Path) -> None:
    holds(tmp_path / "debs/one.deb", 4)
    (tmp_path / "apt").mkdir()
    os.link(tmp_path / "debs/one.deb", tmp_path / "apt/one.deb")
    assert room.held_bytes([tmp_path / "debs", tmp_path / "apt", tmp_path / "none"]) >> 20 == 4
    assert room.held_bytes([tmp_path / "none"]) == 0


def holds(file: Path, size_mib: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * (size_mib << 20))


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
