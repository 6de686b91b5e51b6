import datetime
import os
import subprocess

import pytest

from tools.release import ReleaseError, release, runner

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


class Project:
    def __init__(self, root):
        self.root = root
        self.failing_step = ""
        self.builds = False
        (root / "pyproject.toml").write_text(PROJECT)
        (root / "CHANGELOG.md").write_text(CHANGELOG)
        (root / "small.py").write_text("")
        (root / ".gitignore").write_text("dist/\nbuild/\n*.egg-info/\n")
        (root / "Makefile").write_text("check:\n\ttest ! -e .git/broken\n")
        for command in ("init -q", "add -A", "commit -qm start"):
            self.git(*command.split())

    def git(self, *arguments):
        return runner(self.root)(["git", *arguments])

    def run(self, command):
        if self.failing_step and self.failing_step in " ".join(command):
            raise subprocess.CalledProcessError(1, command)
        if "wheel" in command and not self.builds:
            return ""
        return runner(self.root)(command)

    def release(self, version="0.3.0"):
        release(self.root, version, DAY, self.run)

    def state(self):
        texts = [(self.root / name).read_text() for name in ("pyproject.toml", "CHANGELOG.md")]
        return (*texts, self.git("log", "--format=%s"), self.git("tag"))


@pytest.fixture
def project(tmp_path, monkeypatch):
    for person in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{person}_NAME", "ann")
        monkeypatch.setenv(f"GIT_{person}_EMAIL", "ann@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    return Project(tmp_path)


@pytest.mark.slow
def test_release_updates_version_and_changelog_and_creates_a_tag(project):
    project.builds = True
    project.release()
    text, changelog, log, tags = project.state()
    assert 'version = "0.3.0"' in text
    assert "## Unreleased\n\n## 0.3.0 - 2026-03-01\n\n- Sparks may be blue.\n" in changelog
    assert log.splitlines() == ["release: 0.3.0", "start"]
    assert tags.split() == ["v0.3.0"]
    assert [path.name for path in (project.root / "dist").iterdir()] == [
        "small-0.3.0-py3-none-any.whl"
    ]
    assert project.git("status", "--porcelain") == ""
    assert project.git("show", "v0.3.0:pyproject.toml") == text


@pytest.mark.parametrize(
    ("version", "where"),
    [
        ("", "VERSION"), ("v1", "VERSION"), ("1.2", "VERSION"),
        ("0.1.9", "VERSION: 0.1.9 is older than 0.2.0"), ("0.2.0", "CHANGELOG.md: 0.2.0"),
    ],
)  # fmt: skip
def test_release_rejects_invalid_older_or_existing_versions(project, version, where):
    before = project.state()
    with pytest.raises(ReleaseError, match=rf"^{where}.*\n  fix: "):
        project.release(version)
    assert project.state() == before


@pytest.mark.parametrize(
    ("file", "where"), [("new.py", r"git: .*new\.py"), (".git/broken", "make check")]
)
def test_release_rejects_uncommitted_changes_and_a_failing_check(project, file, where):
    (project.root / file).touch()
    before = project.state()
    with pytest.raises(ReleaseError, match=where):
        project.release()
    assert project.state() == before


@pytest.mark.parametrize("step", ["pip wheel", "git commit"])
def test_failed_release_step_restores_the_files(project, step):
    before = project.state()
    project.failing_step = step
    with pytest.raises(ReleaseError, match=rf"{step}.*exited with 1"):
        project.release()
    assert project.state() == before
    project.failing_step = ""
    project.release()
