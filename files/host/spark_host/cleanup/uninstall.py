"""``spark-host uninstall``: removes everything we created; an interrupted run can be repeated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from spark_contract import files
from spark_contract.documents import DocumentError, parse
from spark_contract.errors import HostToolError
from spark_contract.paths import Paths
from spark_contract.status import Footprint, Ours, Thing
from spark_contract.tool import NOTE, UNINSTALL

from spark_host.cleanup import baseline, manifest, resources
from spark_host.rollout.rollout import all_rollout_locks
from spark_host.system import docker, systemd
from spark_host.system.programs import print_json, run_program

_STOP_LIMIT_S = 900.0
_ROUNDS = 6  # folders become empty and packages unneeded only after a round


def remove(wanted: Footprint, paths: Paths) -> Ours:
    """Remove all that may be removed; return it, and the failures."""
    gone: dict[tuple[str, str], Thing] = {}
    problems: list[str] = []
    for _ in range(_ROUNDS):
        current = manifest.read_manifest(wanted, paths)
        removable = [thing for thing in current.things if not thing.stays]
        removable = [thing for thing in removable if thing.kind != manifest.NOTE] or removable
        if not removable:
            break
        problems = _remove_round(removable, wanted, paths)
        gone = {(thing.kind, thing.name): thing for thing in removable} | gone
        if problems:
            break
    return replace(current, things=tuple(gone.values()), problems=tuple(problems))


def _remove_round(things: list[Thing], wanted: Footprint, paths: Paths) -> list[str]:
    """Remove things kind by kind, in the order of the manifest; stop at the first failure."""
    before = baseline.read_baseline(paths)
    together: dict[str, Callable[[list[str]], str]] = {
        "service": _stop_units,
        "image": lambda names: next(filter(None, map(docker.remove_image, names)), ""),
        "package": baseline.remove_packages,
    }
    remove_folder = lambda name: resources.remove_folder(Path(name))  # noqa: E731
    each: dict[str, Callable[[str], None]] = {
        **dict.fromkeys(("tree", "source", "cache"), remove_folder),
        "container": docker.remove_container,
        "settings": lambda name: baseline.restore_shared_file(name, wanted, before, paths),
        "mask": lambda name: _run("systemctl", "--no-pager", "unmask", name),
        "boot target": lambda name: _run("systemctl", "--no-pager", "set-default", name),
        "docker user": lambda name: _run("gpasswd", "-d", name, "docker"),
        "user": lambda name: _run("userdel", name),
        "group": lambda name: _run("groupdel", name),
        "directory": _remove_empty_folder,
        manifest.NOTE: _remove_baseline,
    }
    for kind in dict.fromkeys(thing.kind for thing in things):
        names = [thing.name for thing in things if thing.kind == kind]
        if kind in together:
            if problem := together[kind](names):
                return [problem]
            continue
        for name in names:
            each.get(kind, _delete)(name)
        if kind in ("unit", "boot link", "file"):
            systemd.reload()
    return []


def _stop_units(names: list[str]) -> str:
    done = systemd.systemctl("stop", *names, timeout_s=_STOP_LIMIT_S)
    for name in names:
        systemd.reset(name)
    return "" if done.returncode == 0 else f"systemctl stop: {done.stderr.strip()}"


def _remove_empty_folder(name: str) -> None:
    with suppress(FileNotFoundError):  # purging a package removes empty unit folders
        Path(name).rmdir()


def _delete(name: str) -> None:
    path = Path(name)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        files.remove(path)


def _remove_baseline(name: str) -> None:
    files.remove(Path(name))
    if not any(Path(name).parent.iterdir()):
        Path(name).parent.rmdir()


def _run(*argv: str) -> None:
    done = run_program(argv, 60)
    if done.returncode != 0:
        raise HostToolError(" ".join(argv), done.stderr.strip(), "fix the cause, then run again")


def main(verb: str, text: str, paths: Paths) -> int:
    try:
        wanted = parse(Footprint, text)
    except DocumentError as error:
        fix = "run deploys/uninstall.py"
        raise HostToolError(verb, f"cannot be read: {error}", fix, 2) from error
    if verb == NOTE:
        baseline.record_baseline(wanted, paths)
        return 0
    with all_rollout_locks(paths) if verb == UNINSTALL else nullcontext():
        result = (remove if verb == UNINSTALL else manifest.read_manifest)(wanted, paths)
    print_json(result)
    return 1 if result.problems else 0
