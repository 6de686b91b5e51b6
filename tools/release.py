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
    def __init__(self, where: str, problem: str, fix: str) -> None:
        super().__init__(f"{where}: {problem}\n  fix: {fix}")


def runner(root: Path) -> Run:
    return lambda command: subprocess.check_output(command, cwd=root, text=True)


def parse_version(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise ReleaseError("VERSION", f'"{version}" is not a version', "use a form such as 1.2.3")
    return tuple(int(part) for part in version.split("."))


def set_version(project: str, version: str) -> str:
    """Raises ReleaseError if the new version is older than the current version."""
    match = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    if match is None:
        raise ReleaseError("pyproject.toml", "the version is missing", 'add `version = "0.0.0"`')
    current = match[1]
    if parse_version(version) < parse_version(current):
        raise ReleaseError("VERSION", f"{version} is older than {current}", "use a later version")
    return project[: match.start(1)] + version + project[match.end(1) :]


def date_changelog(changelog: str, version: str, day: datetime.date) -> str:
    """Return the changelog with the unreleased entries below a heading of the release.

    Raises ReleaseError if there are none, or the version was released before.
    """
    if re.search(rf"^## {re.escape(version)}\b", changelog, re.MULTILINE):
        raise ReleaseError("CHANGELOG.md", f"{version} was released before", "use a later version")
    before, heading, entries = changelog.partition(UNRELEASED)
    if not heading or not re.match(r"\s*(?!## )\S", entries):
        raise ReleaseError(
            "CHANGELOG.md", "`## Unreleased` is empty or missing", "list the changes for users"
        )
    return f"{before}{UNRELEASED}\n## {version} - {day.isoformat()}\n{entries}"


def check_ready(version: str, run: Run) -> None:
    parse_version(version)
    changed = run(["git", "status", "--porcelain"]).splitlines()
    if changed:
        names = ", ".join(line[3:] for line in changed[:5])
        raise ReleaseError("git", f"uncommitted changes: {names}", "commit or remove them")
    if run(["git", "tag", "--list", f"v{version}"]).strip():
        raise ReleaseError("git", f"the tag v{version} exists", "use a later version")
    try:
        run(["make", "--no-print-directory", "check"])
    except subprocess.CalledProcessError:
        fix = "fix the reported problems and commit"
        raise ReleaseError("make check", "failed", fix) from None


def release(root: Path, version: str, day: datetime.date, run: Run) -> None:
    """Raises ReleaseError after restoring the files if a step before the commit fails."""
    check_ready(version, run)
    project, changelog = root / "pyproject.toml", root / "CHANGELOG.md"
    texts = {
        project: set_version(project.read_text("utf-8"), version),
        changelog: date_changelog(changelog.read_text("utf-8"), version, day),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check",
             "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]  # fmt: skip
    files = [path.name for path in texts]
    try:
        run(wheel)
        run(["git", "commit", "--quiet", "--message", f"release: {version}", "--", *files])
    except subprocess.CalledProcessError as error:
        run(["git", "checkout", "--quiet", "--", *files])
        raise step_error(error, "fix the reported problem and run the release again") from None
    try:
        run(["git", "tag", "--annotate", "--message", version, f"v{version}"])
    except subprocess.CalledProcessError as error:
        raise step_error(error, "run this command; the release is committed") from None


def step_error(error: subprocess.CalledProcessError, fix: str) -> ReleaseError:
    return ReleaseError(" ".join(error.cmd), f"exited with {error.returncode}", fix)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    version = parser.parse_args(argv).version
    try:
        release(CHECKOUT, version, datetime.date.today(), runner(CHECKOUT))
    except ReleaseError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"released {version}; publish it with `git push origin HEAD v{version}`\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
