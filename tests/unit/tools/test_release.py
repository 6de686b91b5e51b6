"""A release is made whole from a clean and green tree, or not at all."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.release import ReleaseError, release, run_in, with_heading, with_version

DAY = datetime.date(2026, 3, 1)
PROJECT = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "small"
version = "0.2.0"

[tool.setuptools]
py-modules = ["small"]
"""
CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n- Sparks may be blue.\n\n## 0.2.0 - 2026-01-01\n\n- One.\n"
)


class Place:
    """A small project of its own under git; its wheel is built only where that is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fails = ""
        self.builds = False
        (root / "pyproject.toml").write_text(PROJECT)
        (root / "CHANGELOG.md").write_text(CHANGELOG)
        (root / "small.py").write_text("")
        (root / ".gitignore").write_text("dist/\nbuild/\n*.egg-info/\n")
        (root / "Makefile").write_text("check:\n\ttest ! -e .git/red\n")
        for words in ("init -q", "add -A", "commit -qm start"):
            self.git(*words.split())

    def git(self, *words: str) -> str:
        return run_in(self.root)(["git", *words])

    def run(self, command: Sequence[str]) -> str:
        if self.fails and self.fails in " ".join(command):
            raise subprocess.CalledProcessError(1, command)
        if "wheel" in command and not self.builds:
            return ""
        return run_in(self.root)(command)

    def release(self, version: str = "0.3.0") -> None:
        release(self.root, version, DAY, self.run)

    def state(self) -> tuple[str, ...]:
        texts = [(self.root / name).read_text() for name in ("pyproject.toml", "CHANGELOG.md")]
        return (*texts, self.git("log", "--format=%s"), self.git("tag"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "ann")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "ann@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    return Place(tmp_path)


@pytest.mark.slow
def test_a_release_is_version_dated_changelog_wheel_commit_and_tag(place: Place) -> None:
    place.builds = True
    place.release()
    project, changelog, log, tags = place.state()
    assert 'version = "0.3.0"' in project
    assert "## Unreleased\n\n## 0.3.0 - 2026-03-01\n\n- Sparks may be blue.\n" in changelog
    assert log.splitlines() == ["release: 0.3.0", "start"]
    assert tags.split() == ["v0.3.0"]
    assert [path.name for path in (place.root / "dist").iterdir()] == [
        "small-0.3.0-py3-none-any.whl"
    ]
    assert place.git("status", "--porcelain") == ""
    assert place.git("show", "v0.3.0:pyproject.toml") == project


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("", 'VERSION: "" is no version'),
        ("v1", 'VERSION: "v1" is no version'),
        ("1.2", 'VERSION: "1.2" is no version'),
        ("0.1.9", "VERSION: 0.1.9 is older than 0.2.0"),
        ("0.2.0", "CHANGELOG.md: has 0.2.0 already"),
    ],
)
def test_a_version_that_cannot_be_is_refused(place: Place, version: str, said: str) -> None:
    before = place.state()
    with pytest.raises(ReleaseError, match=r"\n  fix: ") as refused:
        place.release(version)
    assert str(refused.value).startswith(said)
    assert place.state() == before


def test_a_tree_with_changes_is_refused_by_name(place: Place) -> None:
    (place.root / "new.py").write_text("")
    with pytest.raises(ReleaseError, match=r"git: there are changes: new\.py\n  fix: commit"):
        place.release()


def test_a_red_check_is_refused(place: Place) -> None:
    (place.root / ".git/red").touch()
    before = place.state()
    with pytest.raises(ReleaseError, match="make check: is not green"):
        place.release()
    assert place.state() == before


def test_a_tag_that_is_taken_is_refused(place: Place) -> None:
    place.git("tag", "v0.3.0")
    with pytest.raises(ReleaseError, match=r"the tag v0\.3\.0 is there"):
        place.release()


def test_nothing_to_tell_is_no_release(place: Place) -> None:
    place.release("0.3.0")
    with pytest.raises(ReleaseError, match="says nothing below `## Unreleased`"):
        place.release("0.4.0")


@pytest.mark.parametrize("step", ["pip wheel", "git commit"])
def test_a_step_that_fails_leaves_the_files_as_they_were(place: Place, step: str) -> None:
    before = place.state()
    place.fails = step
    with pytest.raises(ReleaseError, match=rf"{step}.*ended with 1"):
        place.release()
    assert place.state() == before
    place.fails = ""
    place.release()


def test_a_tag_that_fails_is_told_with_the_commit_that_is_there(place: Place) -> None:
    place.fails = "git tag --annotate"
    with pytest.raises(ReleaseError, match="fix: run it: the commit of the release is there"):
        place.release()
    assert place.git("log", "--format=%s").splitlines()[0] == "release: 0.3.0"


def test_the_files_of_this_checkout_can_be_released() -> None:
    root = Path(__file__).resolve().parents[3]
    assert 'version = "9.0.0"' in with_version((root / "pyproject.toml").read_text(), "9.0.0")
    changelog = (root / "CHANGELOG.md").read_text()
    assert "\n## 9.0.0 - 2026-03-01\n" in with_heading(changelog, "9.0.0", DAY)


def test_the_command_says_one_message_and_ends_with_1() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.release", "next"],
        cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == 'VERSION: "next" is no version\n  fix: make release VERSION=1.2.3\n'
