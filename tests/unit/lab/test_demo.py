"""The demo prints requirements first, and needs only Python until then."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab import demo, room
from lab.errors import LabError
from lab.paths import LabPaths
from spark_deploy.cli.hosts import Target, build_plan
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.settings.load import load_hosts
from tests.labkit import CHECKOUT


def test_lab_commands_import_only_the_standard_library() -> None:
    program = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); import lab.cli, lab.hub.server"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


@pytest.mark.parametrize("engine", ["stub", "cpu"])
def test_prints_requirements_without_creating_anything(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40 * 10**9))
    monkeypatch.setattr(demo, "missing_packages", lambda: ["mmdebstrap", "tinyproxy-bin"])
    lab = LabPaths(tmp_path / "some/where/lab")
    demo.print_requirements(lab, engine)
    printed = capsys.readouterr().out
    assert "mmdebstrap tinyproxy-bin\n" in printed
    assert ("memory " in printed) == (engine == "cpu")
    assert not lab.state.exists()


def test_refuses_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    lab = LabPaths(tmp_path / "lab")
    needed = sum(part.size_bytes for part in room.list_parts(lab, tmp_path, demo.HOSTS, "cpu"))
    monkeypatch.setattr(demo, "CHECKOUT", tmp_path)
    with pytest.raises(LabError, match=rf"1.0 GB free, {needed / 1e9:.1f} GB needed"):
        demo.print_requirements(lab, "cpu")


def test_engine_memory_matches_the_plan() -> None:
    settings = load_hosts({"lab": ["lab-1"]}, root=CHECKOUT)["lab-1"]
    plan = build_plan(Target("lab-1", {}, settings, read_catalog()), estimate=True)
    needed = plan.needs.memory_needed_bytes
    assert needed <= room.ENGINE_MEMORY_BYTES < needed + (1 << 28)
