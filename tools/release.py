"""Make a release: ``make release VERSION=1.2.3``.

On a clean tree with a green ``make check``: the version into pyproject.toml, a dated heading into
the changelog, a wheel into ``dist/``, one commit and one tag. Nothing is pushed. What fails before
the commit leaves both files as they were.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
UNRELEASED = "## Unreleased\n"
Run = Callable[[Sequence[str]], str]


class ReleaseError(Exception):
    """Why there is no release: where, what, how to fix."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(f"{where}: {what}\n  fix: {fix}")


def run_in(root: Path) -> Run:
    """Return what runs a program in ``root`` and returns its output; errors show on the terminal.

    Raises:
        subprocess.CalledProcessError: the program failed.
    """

    def run(command: Sequence[str]) -> str:
        return subprocess.run(
            command, cwd=root, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    return run


def numbers(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version.

    Raises:
        ReleaseError: it is no such version.
    """
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise ReleaseError("VERSION", f'"{version}" is no version', "make release VERSION=1.2.3")
    return tuple(int(part) for part in version.split("."))


def with_version(project: str, version: str) -> str:
    """Return pyproject.toml's text with another version.

    Raises:
        ReleaseError: the present version is not older.
    """
    found = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    if found is None:
        raise ReleaseError("pyproject.toml", "has no version", 'write `version = "0.0.0"`')
    if numbers(version) < numbers(found[1]):
        raise ReleaseError("VERSION", f"{version} is older than {found[1]}", "name a later one")
    return project[: found.start(1)] + version + project[found.end(1) :]


def with_heading(changelog: str, version: str, day: datetime.date) -> str:
    """Return the changelog with what was unreleased below a heading of the release.

    Raises:
        ReleaseError: there is nothing to release, or this version is there already.
    """
    if re.search(rf"^## {re.escape(version)}\b", changelog, re.MULTILINE):
        raise ReleaseError("CHANGELOG.md", f"has {version} already", "name a later version")
    before, found, after = changelog.partition(UNRELEASED)
    if not found or not re.match(r"\s*(?!## )\S", after):
        raise ReleaseError(
            "CHANGELOG.md", "says nothing below `## Unreleased`", "write what changes for users"
        )
    return f"{before}{UNRELEASED}\n## {version} - {day.isoformat()}\n{after}"


def refuse_unready(version: str, run: Run) -> None:
    """Refuse a tree that is not what would be released.

    Raises:
        ReleaseError: it has changes, the tag is taken, or the check is red.
    """
    numbers(version)
    changed = run(["git", "status", "--porcelain"]).splitlines()
    if changed:
        names = ", ".join(line[3:] for line in changed[:5])
        raise ReleaseError("git", f"there are changes: {names}", "commit or remove them first")
    if run(["git", "tag", "--list", f"v{version}"]).strip():
        raise ReleaseError("git", f"the tag v{version} is there", "name a later version")
    try:
        run(["make", "--no-print-directory", "check"])
    except subprocess.CalledProcessError:
        fix = "run it, mend what it says, commit"
        raise ReleaseError("make check", "is not green", fix) from None


def release(root: Path, version: str, day: datetime.date, run: Run) -> None:
    """Write, build, commit and tag the release; before the commit a failure undoes the writing.

    Raises:
        ReleaseError: it was refused, or a step failed.
    """
    refuse_unready(version, run)
    project, changelog = root / "pyproject.toml", root / "CHANGELOG.md"
    before = {path: path.read_text("utf-8") for path in (project, changelog)}
    write(
        {
            project: with_version(before[project], version),
            changelog: with_heading(before[changelog], version, day),
        }
    )
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
             "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]  # fmt: skip
    files = [path.name for path in before]
    try:
        run(wheel)
        run(["git", "commit", "--quiet", "--message", f"release: {version}", "--", *files])
    except subprocess.CalledProcessError as error:
        write(before)
        raise failed(error, "mend what it says, then run this again") from None
    try:
        run(["git", "tag", "--annotate", "--message", version, f"v{version}"])
    except subprocess.CalledProcessError as error:
        raise failed(error, "run it: the commit of the release is there") from None


def failed(error: subprocess.CalledProcessError, fix: str) -> ReleaseError:
    return ReleaseError(" ".join(error.cmd), f"ended with {error.returncode}", fix)


def write(texts: dict[Path, str]) -> None:
    """Write each text to its file."""
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; a refusal is one message and status 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    version = parser.parse_args(argv).version
    try:
        release(CHECKOUT, version, datetime.date.today(), run_in(CHECKOUT))
    except ReleaseError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"released {version}: `git push origin HEAD v{version}` publishes it\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
