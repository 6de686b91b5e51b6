"""A CDI specification that a driver update left behind is made anew before an engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from spark_contract.paths import Paths
from spark_host.engine import container
from spark_host.records import proof

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
FAKE = """#!/bin/sh
echo "$@" >> "$0.asked"
[ -e "$0.broken" ] && exit 1
printf 'kind: nvidia.com/gpu\\nlibcuda.so.580.173.02\\n' > "${3#--output=}"
"""


@pytest.fixture
def nvidia_ctk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin/nvidia-ctk"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(proof, "driver", lambda: NEW)
    return program


def asked(program: Path) -> str:
    path = program.with_name("nvidia-ctk.asked")
    return path.read_text() if path.exists() else ""


def specification(tmp_path: Path, text: str, name: str = "nvidia.yaml") -> Path:
    path = tmp_path / "etc/cdi" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_one_of_an_older_driver_is_made_anew_in_its_place(tmp_path: Path, nvidia_ctk: Path) -> None:
    spec = specification(tmp_path, SPECIFICATION.format(driver=OLD))
    said: list[str] = []
    container.refresh_cdi(said.append, Paths(tmp_path))
    assert asked(nvidia_ctk) == f"cdi generate --output={spec}\n"
    assert said == [f"{spec} is of driver {OLD}, {NEW} is loaded: regenerating it"]
    container.refresh_cdi(said.append, Paths(tmp_path))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SPECIFICATION.format(driver=NEW), "nvidia.yaml"),
        ("kind: vendor.example/net\nlibcuda.so.580.1.1\n", "net.yaml"),
        ("kind: nvidia.com/gpu\nlibcuda.so.1\n", "nvidia.json"),
        (SPECIFICATION.format(driver=OLD), "nvidia.yaml.before"),
    ],
)
def test_every_other_file_is_left_as_it_is(
    tmp_path: Path, nvidia_ctk: Path, text: str, name: str
) -> None:
    spec = specification(tmp_path, text, name)
    container.refresh_cdi(pytest.fail, Paths(tmp_path))
    assert (asked(nvidia_ctk), spec.read_text()) == ("", text)


@pytest.mark.usefixtures("nvidia_ctk")
def test_without_a_driver_or_a_folder_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container.refresh_cdi(pytest.fail, Paths(tmp_path))
    specification(tmp_path, SPECIFICATION.format(driver=OLD))
    monkeypatch.setattr(proof, "driver", lambda: "")
    container.refresh_cdi(pytest.fail, Paths(tmp_path))


def test_a_failure_is_told_and_does_not_end_the_start(tmp_path: Path, nvidia_ctk: Path) -> None:
    nvidia_ctk.with_name("nvidia-ctk.broken").touch()
    spec = specification(tmp_path, SPECIFICATION.format(driver=OLD))
    said: list[str] = []
    container.refresh_cdi(said.append, Paths(tmp_path))
    assert "run it by hand to see why" in said[-1]
    assert OLD in spec.read_text()
