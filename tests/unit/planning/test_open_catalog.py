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
PROFILE = f"""\
# yaml-language-server: $schema=../../schema/profile.schema.json
summary: One draft token
choose_when: you want the effect of a second draft token
published:
  - what: a community Spark
    value: 44 tokens/s
    source: community report, on vLLM; not measured by this project
    model: {DEFAULT.model}
    tokens_per_s: 44
shared_experts: fp8-donor
head: int8-g128
plugin: true
speculation: {{method: mtp, tokens: 1}}
limits: {{max_sequences: 2, max_batched_tokens: 8192, memory_fraction: 0.8}}
check: {{acceptance_floor: 0.4}}
"""
READS_CATALOG = re.compile(r"catalog|planning\.(plans|test_)")
GOLDENS = "tests/unit/planning/test_goldens.py"


@pytest.fixture
def checkout(tmp_path):
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        if (CHECKOUT / name).exists():
            target = tmp_path / "checkout" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target, follow_symlinks=False)
    return tmp_path / "checkout"


def run(checkout, *arguments, **variables):
    folders = (".", "files/contract", "files/checkpoint")
    path = os.pathsep.join(str(checkout / folder) for folder in folders)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def new_model(checkout):
    path = checkout / f"catalog/models/{DEFAULT.model}.yml"
    text = path.read_text("utf-8")
    data = yaml.safe_load(text)
    data["sources"] = {"base": "org/another-int4", "donor": "org/another-fp8"}
    data["tensors"]["counts"] = None
    data["architecture"] |= {"max_context_tokens": 65536, "vision_bytes": 0}
    data["image"] = {"role": "another_engine"}
    return f"{text.splitlines()[0]}\n{yaml.safe_dump(data)}"


def catalog_tests(checkout):
    tests = sorted((checkout / "tests/unit").rglob("test_*.py"))
    others = (test for test in tests if test.name != Path(__file__).name)
    return [str(test) for test in others if READS_CATALOG.search(test.read_text("utf-8"))]


def golden_files(checkout):
    return set((checkout / "tests/unit/planning/golden").iterdir())


@pytest.mark.slow
def test_new_model_and_profile_need_one_file_each(checkout):
    before = golden_files(checkout)
    (checkout / "catalog/models/another.yml").write_text(new_model(checkout))
    (checkout / "catalog/profiles/one-draft.yml").write_text(PROFILE)

    run(checkout, "tools/docs/generate.py")
    run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", GOLDENS, GOLDEN="write")

    tests = catalog_tests(checkout)
    assert len(tests) > 40
    run(checkout, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *tests)
    run(checkout, "tools/docs/generate.py", "--check")

    added = {path.name: path for path in golden_files(checkout) - before}
    profiles = [name for name in added if name.endswith("--one-draft.txt")]
    assert "another--one-draft.txt" in profiles
    assert len(profiles) > 1
    for name in profiles:
        text = added[name].read_text("utf-8")
        assert "not locked" not in text
        assert len(text.splitlines()) < 100
