"""Take what is ours off this host; whatever ends it half way, the next run goes on from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from spark_contract import files
from spark_contract.documents import DocumentError, parse
from spark_contract.errors import HostToolError
from spark_contract.keep import Footprint, Ours, Thing
from spark_contract.paths import Paths
from spark_contract.release import service_of

from spark_host.prune import holdings
from spark_host.rollout.rollout import rollout_lock
from spark_host.system import docker, systemd
from spark_host.system.host import Host, release_names
from spark_host.system.programs import print_json, run_program
from spark_host.uninstall import baseline, ours, packages

_STOP_LIMIT_S = 900.0
_ROUNDS = 6  # what is empty or unused is seen only when the rest is gone


def remove(wanted: Footprint, paths: Paths) -> Ours:
    """Remove all that may go; return it, with what could not be removed."""
    gone: dict[tuple[str, str], Thing] = {}
    problems: list[str] = []
    for _ in range(_ROUNDS):
        found = ours.look(wanted, paths)
        going = [thing for thing in found.things if not thing.stays]
        going = [thing for thing in going if thing.kind != ours.NOTE] or going
        if not going:
            break
        problems = _round(going, wanted, paths)
        gone = {(thing.kind, thing.name): thing for thing in going} | gone
        if problems:
            break
    return replace(found, things=tuple(gone.values()), problems=tuple(problems))


def _round(going: list[Thing], wanted: Footprint, paths: Paths) -> list[str]:
    """Remove what a look found, kind by kind in its order; a kind that fails ends the round."""
    before = baseline.noted(paths)
    together: dict[str, Callable[[list[str]], str]] = {
        "service": _stop,
        "image": _images,
        "package": packages.remove,
    }
    each: dict[str, Callable[[str], None]] = {
        **dict.fromkeys(
            ("tree", "source", "cache"), lambda name: holdings.remove_folder(Path(name))
        ),
        "container": docker.remove_container,
        "settings": lambda name: packages.restore(name, wanted, before, paths),
        "mask": lambda name: _systemctl("unmask", name),
        "boot target": lambda name: _systemctl("set-default", name),
        "docker user": lambda name: _run("gpasswd", "-d", name, "docker"),
        "user": lambda name: _run("userdel", name),
        "group": lambda name: _run("groupdel", name),
        "directory": _remove_directory,
        ours.NOTE: _forget,
    }
    for kind in dict.fromkeys(thing.kind for thing in going):
        listed = [thing.name for thing in going if thing.kind == kind]
        if kind in together:
            if problem := together[kind](listed):
                return [problem]
            continue
        for name in listed:
            each.get(kind, _delete)(name)
        if kind in ("unit", "boot link", "file"):
            systemd.reload()
    return []


def _remove_directory(name: str) -> None:
    with suppress(FileNotFoundError):  # purging a package removes empty unit folders
        Path(name).rmdir()


def _stop(listed: list[str]) -> str:
    """End gateways before engines, so that answers under way end and no question comes in."""
    said = systemd.systemctl("stop", *listed, timeout_s=_STOP_LIMIT_S)
    for name in listed:
        systemd.reset(name)
    return "" if said.returncode == 0 else f"systemctl stop: {said.stderr.strip()}"


def _images(references: list[str]) -> str:
    for reference in references:
        said = docker.client("rmi", reference, timeout_s=600)
        if said.returncode != 0 and "No such image" not in said.stderr:
            return f"image {reference}: {said.stderr.strip()}"
    return ""


def _delete(name: str) -> None:
    path = Path(name)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        files.remove(path)


def _systemctl(*words: str) -> None:
    said = systemd.systemctl(*words)
    if said.returncode != 0:
        raise HostToolError(
            f"systemctl {' '.join(words)}", said.stderr.strip(), "mend it, then run again"
        )


def _forget(name: str) -> None:
    files.remove(Path(name))
    if not any(Path(name).parent.iterdir()):
        Path(name).parent.rmdir()


def _run(*argv: str) -> None:
    said = run_program(argv, 60)
    if said.returncode != 0:
        raise HostToolError(" ".join(argv), said.stderr.strip(), "mend it, then run again")


def main(verb: str, text: str, paths: Paths) -> int:
    """Run ``note``, ``manifest`` or ``uninstall``; ``text`` is a ``Footprint`` in JSON."""
    try:
        wanted = parse(Footprint, text)
    except DocumentError as error:
        raise HostToolError(
            verb, f"cannot be read: {error}", "run it from its deploy", 2
        ) from error
    if verb == "note":
        baseline.note(wanted, paths)
        return 0
    with ExitStack() as locks:
        if verb == "uninstall":
            for service in sorted({service_of(name) for name in release_names(paths)}):
                locks.enter_context(rollout_lock(service, Host(paths)))
        found = remove(wanted, paths) if verb == "uninstall" else ours.look(wanted, paths)
    print_json(found)
    return 1 if found.problems else 0
