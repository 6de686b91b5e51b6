"""A new model or profile is one new file: `make golden docs` later everything is green."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.types import Settings

DEFAULT = Settings()
PROFILE = """\
# yaml-language-server: $schema=../../schema/profile.schema.json
summary: One draft token
choose_when: you wonder what a second one is good for
published:
  - what: somebody's Spark
    value: 44 tokens/s
    source: somebody, on vLLM; not measured by this project
    model: MODEL
    tokens_per_s: 44
shared_experts: fp8-donor
head: int8-g128
plugin: true
speculation: {method: mtp, tokens: 1}
limits: {max_sequences: 2, max_batched_tokens: 8192, memory_fraction: 0.8}
check: {acceptance_floor: 0.4}
"""
# Whatever can read the catalog can find a new file wrong: by importing its reader, however far
# away, or by its path.
READER = "spark_deploy/config/catalog/load.py"
BY_PATH = re.compile(r"catalog_names\(|\"catalog[/\"]|catalog/(models|profiles)")
BESIDE = ("test_open_catalog.py",)


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


def reading(checkout: Path) -> list[Path]:
    """Return the tests that can read the catalog."""
    found = []
    for test in sorted((checkout / "tests/unit").rglob("test_*.py")):
        text = test.read_text("utf-8")
        reads = BY_PATH.search(text) or checkout / READER in reached(test, checkout)
        found += [test] if reads and test.name not in BESIDE else []
    return found


def reached(start: Path, checkout: Path) -> set[Path]:
    """Return the modules that importing one brings in, wherever in it they are imported."""
    seen, coming = {start}, [start]
    while coming:
        path = coming.pop()
        for found in imported(path, path.parent, checkout) - seen:
            seen.add(found)
            coming.append(found)
    return seen


@functools.cache
def imported(path: Path, beside: Path, checkout: Path) -> set[Path]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    places = (folder / name.replace(".", "/") for name in names for folder in (checkout, beside))
    modules = {one for place in places for one in (place.with_suffix(".py"), place / "__init__.py")}
    return {one for one in modules if one.is_file()}


def small_ones(checkout: Path) -> set[Path]:
    return set((checkout / "tests/unit/planning/golden").iterdir())


@pytest.mark.slow
def test_one_file_for_a_model_and_one_for_a_profile_are_all_it_takes(checkout: Path) -> None:
    before = small_ones(checkout)
    (checkout / "catalog/models/another.yml").write_text(a_model(checkout))
    (checkout / "catalog/profiles/one-draft.yml").write_text(
        PROFILE.replace("MODEL", DEFAULT.model)
    )

    run(checkout, "tools/docs/generate.py")
    goldens = "tests/unit/planning/test_goldens.py"
    run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", goldens, GOLDEN="write")

    asked = reading(checkout)
    assert len(asked) > 60
    run(checkout, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *map(str, asked))
    run(checkout, "tools/docs/generate.py", "--check")

    added = {path.name: path for path in small_ones(checkout) - before}
    assert {name.partition("--")[2] for name in added} > {"one-draft.txt"}
    profile = [path for name, path in added.items() if name.endswith("--one-draft.txt")]
    said = [path.read_text("utf-8") for path in (*profile, added["another--one-draft.txt"])]
    assert all("not locked" not in text for text in said)
    assert max(len(text.splitlines()) for text in said) < 100
