"""A new model or profile is one new file: `make golden docs` later everything is green."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spark_deploy.checkout import CHECKOUT
from spark_deploy.settings.types import Settings

DEFAULT = Settings()
PROFILE = """\
# yaml-language-server: $schema=../../schema/profile.schema.json
summary: One draft token
choose_when: you wonder what a second one is good for
shared_experts: fp8-donor
head: int8-g128
plugin: true
speculation: {method: mtp, tokens: 1}
limits: {max_sequences: 2, max_batched_tokens: 8192, memory_fraction: 0.8}
check: {acceptance_floor: 0.4}
"""
# Whatever reads the catalog can find a new file wrong.
READS = re.compile(r"read_catalog\(\)|shipped\(\)|catalog_names\(|\"catalog/(models|profiles)")
BESIDE = ("test_open_catalog.py", "test_rooms.py", "test_declarations.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout, as a person has it who adds a file."""
    told = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in told.stdout.splitlines():
        if (CHECKOUT / name).exists():
            target = tmp_path / "checkout" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target, follow_symlinks=False)
    return tmp_path / "checkout"


def run(checkout: Path, *words: str, **more: str) -> None:
    folders = (".", "files/contract", "files/checkpoint")
    path = os.pathsep.join(str(checkout / folder) for folder in folders)
    environment = {**os.environ, "PYTHONPATH": path, **more}
    done = subprocess.run(
        [sys.executable, *words], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def a_model(checkout: Path) -> str:
    """Return the file of a model that nobody has made: names and layers of its own."""
    path = checkout / f"catalog/models/{DEFAULT.model}.yml"
    data = yaml.safe_load(path.read_text("utf-8"))
    data["sources"] = {"base": "org/another-int4", "donor": "org/another-fp8"}
    data["tensors"]["counts"] = None
    data["architecture"] |= {"max_context_tokens": 65536, "vision_bytes": 0}
    data["image"] = {"role": "another_engine"}
    first = path.read_text("utf-8").splitlines()[0]
    return f"{first}\n{yaml.safe_dump(data)}"


def small_ones(checkout: Path) -> set[Path]:
    return set((checkout / "tests/unit/planning/golden").iterdir())


@pytest.mark.slow
def test_one_file_for_a_model_and_one_for_a_profile_are_all_it_takes(checkout: Path) -> None:
    before = small_ones(checkout)
    (checkout / "catalog/models/another.yml").write_text(a_model(checkout))
    (checkout / "catalog/profiles/one-draft.yml").write_text(PROFILE)

    run(checkout, "docs/generate.py")
    goldens = "tests/unit/planning/test_goldens.py"
    run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", goldens, GOLDEN="write")

    tests = sorted((checkout / "tests/unit").rglob("test_*.py"))
    asked = [p for p in tests if READS.search(p.read_text("utf-8")) and p.name not in BESIDE]
    assert len(asked) > 8
    run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, asked))
    run(checkout, "docs/generate.py", "--check")

    added = {path.name: path for path in small_ones(checkout) - before}
    assert {name.partition("--")[2] for name in added} > {"one-draft.txt"}
    profile = [path for name, path in added.items() if name.endswith("--one-draft.txt")]
    said = [path.read_text("utf-8") for path in (*profile, added["another--one-draft.txt"])]
    assert all("not locked" not in text for text in said)
    assert max(len(text.splitlines()) for text in said) < 100
