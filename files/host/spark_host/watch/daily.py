"""The daily inspection; `status` and `doctor` report its problems."""

import hashlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from spark_contract import receipts
from spark_contract.machine import GIB
from spark_contract.paths import RECEIPT_NAME, Paths
from spark_contract.records import DailyReport, Proof
from spark_contract.release import Release
from spark_contract.tool import HostToolError, Problem
from spark_contract.units import GATEWAY, WATCH

from spark_host.records import boot
from spark_host.system import folders, programs
from spark_host.system.host import Host, load_gateway
from spark_host.system.programs import log

HASH_DAYS = 14  # period in which all bytes of the served checkpoints are hashed
_DAILY_LIMIT_S = 900.0  # of hashing; on a slow disk, all bytes take longer than HASH_DAYS
_BUFFER_BYTES = 8 << 20
CERTIFICATE_DAYS = 30
PROOF_DAYS = 60
JOURNAL_BYTES = 4 << 30
_JOURNAL_FILES = 100_000
FREE_BYTES = 5 << 30
FREE_INODES_SHARE = 0.02
_DAY_S = 86_400
_MAX_CLOCK_ERROR_S = 3_600


def inspect_host(host: Host) -> DailyReport:
    releases = [r for name in host.disk.release_names(host.paths) if (r := host.release(name))]
    running, unknown = _find_running(releases, host)
    last = host.disk.read(DailyReport, host.paths.daily) or DailyReport("", ())
    trees = chain.from_iterable(_checkpoints_needed_at_boot(releases, host).values())
    damaged, position = last.damaged_parts, last.next_part

    def hash_checkpoints() -> Iterator[Problem]:
        nonlocal damaged, position
        problems, position = hash_next(trees, position, damaged)
        damaged = tuple(problems)
        yield from problems.values()

    problems = _collect(
        iter(unknown),
        _stopped_units(running, host),
        _certificates(running, host.paths),
        _journal(host.paths),
        _disks(running, host.paths),
        _clock(running, host),
        _checkpoints(releases, host),
        _stale_proof_problems(running, host),
        _damaged_documents(host.paths),
        hash_checkpoints(),
    )
    return DailyReport(host.clock.now(), tuple(problems), position, damaged)


def _find_running(releases: list[Release], host: Host) -> tuple[list[Release], list[Problem]]:
    """Return the running releases, or none and why they are unknown."""
    try:
        return [r for r in releases if host.units.is_active(r.serve_unit)], []
    except HostToolError as error:
        return [], [Problem(error.where, error.what, error.fix)]


def _collect(*inspections: Iterator[Problem]) -> Iterator[Problem]:
    for inspection in inspections:
        try:
            yield from inspection
        except HostToolError as error:
            yield Problem(error.where, error.what, error.fix)
        except (OSError, ValueError, RecursionError) as error:
            name = getattr(inspection, "__name__", "inspection").strip("_")
            fix = "check the disk (`dmesg`) and the file, then run `spark-host daily`"
            yield Problem("daily check", f"{name} failed: {type(error).__name__} {error}", fix)


def _stopped_units(running: list[Release], host: Host) -> Iterator[Problem]:
    for release in running:
        for unit in (WATCH.unit(release.name), GATEWAY.unit(release.service)):
            if not host.units.is_active(unit):
                message = f"{unit} is not running, but {release.serve_unit} is running"
                fix = f"see `journalctl -u {unit}`, then run `systemctl start {unit}`"
                yield Problem("watch", message, fix)


def _certificates(running: list[Release], paths: Paths) -> Iterator[Problem]:
    for service in sorted({release.service for release in running}):
        try:
            tls = load_gateway(service, paths).tls
        except HostToolError as error:
            yield Problem("gateway", error.what, error.fix)
            continue
        if tls is None:
            continue
        path = paths.below(tls.certificate)
        output = programs.read_output("openssl", "x509", "-in", str(path), "-noout", "-enddate")
        match = re.search(r"notAfter=(\w{3} +\d+ [\d:]+ \d{4}) GMT", output or "")
        if match is None:
            yield Problem("certificate", f"{path} cannot be read", "deploy again")
            continue
        expiry = datetime.strptime(f"{match[1]} +0000", "%b %d %H:%M:%S %Y %z")
        days = (expiry - datetime.now(timezone.utc)).total_seconds() / _DAY_S
        if days < CERTIFICATE_DAYS:
            date = f"{expiry:%Y-%m-%d}, in {days:.0f} days"
            message = f"the certificate of {service} expires on {date}"
            fix = "renew it, then deploy again; a private-ca certificate is renewed automatically"
            yield Problem("certificate", message, fix)


def _journal(paths: Paths) -> Iterator[Problem]:
    # `measure` ignores files that journald removes meanwhile.
    size, _ = folders.measure(paths.below("/var/log/journal"), JOURNAL_BYTES, _JOURNAL_FILES)
    if size > JOURNAL_BYTES:
        message = f"the journal uses {size / GIB:.1f} GiB"
        fix = "run `journalctl --vacuum-size=2G` and set SystemMaxUse=2G"
        yield Problem("journal", message, fix)


def _disks(running: list[Release], paths: Paths) -> Iterator[Problem]:
    used = {paths.root, paths.below("/var")}
    for release in running:
        used |= {paths.below(tree.path) for tree in release.trees}
        used |= {paths.below(release.cache)} if release.cache else set()
    existing = (folder for folder in sorted(used, reverse=True) if folder.exists())
    folder_by_device = {folder.stat().st_dev: folder for folder in existing}
    for folder in sorted(folder_by_device.values()):
        stats = os.statvfs(folder)
        free = stats.f_bavail * stats.f_frsize
        if free < FREE_BYTES:
            message = f"{free / GIB:.1f} GiB is free on the disk that holds {folder}"
            yield Problem("disk", message, "run `spark-deploy prune`, or see `df -h`")
        if stats.f_files and stats.f_favail < FREE_INODES_SHARE * stats.f_files:
            message = (
                f"{stats.f_favail} of {stats.f_files} inodes are free on the disk that holds "
                f"{folder}"
            )
            fix = "run `du --inodes -x / | sort -n` to find the directories with the most files"
            yield Problem("disk", message, fix)


def _clock(running: list[Release], host: Host) -> Iterator[Problem]:
    if programs.read_output("timedatectl", "show", "--property=NTPSynchronized", "--value") == "no":
        fix = "run `timedatectl set-ntp true` and check that a time server can be reached"
        yield Problem("clock", "is not synchronized", fix)
    for release in running:
        age_s = _proof_age_s(boot.read_proof(release.name, host))
        if age_s is not None and age_s < -_MAX_CLOCK_ERROR_S:
            hours = -age_s / 3600
            message = f"went back: {release.name} has its last check {hours:.0f} h in the future"
            yield Problem("clock", message, "correct the clock, then run `spark-check`")


def _checkpoints(releases: list[Release], host: Host) -> Iterator[Problem]:
    for name, trees in _checkpoints_needed_at_boot(releases, host).items():
        for tree in trees:
            if not tree.is_dir():
                message = f"{tree} is missing, but {name} needs this directory at boot"
                fix = "mount its disk (see `findmnt --verify`), or deploy again"
                yield Problem("mounts", message, fix)
                continue
            receipt = receipts.find_receipt(tree)
            if receipt is None or not receipt.files:
                message = f"{name} needs {tree / RECEIPT_NAME}, which is missing, damaged or empty"
                yield Problem("checkpoint", message, "deploy again to verify the files")


def _checkpoints_needed_at_boot(releases: list[Release], host: Host) -> dict[str, list[Path]]:
    checkpoints = {}
    for service in sorted({release.service for release in releases}):
        for name in boot.enabled_releases(service, host):
            if release := host.release(name):
                checkpoints[name] = [host.paths.below(tree.path) for tree in release.trees]
    return checkpoints


def _stale_proof_problems(running: list[Release], host: Host) -> Iterator[Problem]:
    for release in running:
        age_s = _proof_age_s(boot.read_proof(release.name, host))
        if age_s is None:
            yield Problem("proof", f"{release.name} runs without a proof", "run `spark-check`")
        elif age_s > PROOF_DAYS * _DAY_S:
            message = f"{release.name} last passed a check {age_s / _DAY_S:.0f} days ago"
            yield Problem("proof", message, "run `spark-check`")


def _damaged_documents(paths: Paths) -> Iterator[Problem]:
    for folder in (paths.below("/etc/spark"), paths.state):
        for path in sorted(folder.rglob("*.json")):
            try:
                json.loads(path.read_text())
            except FileNotFoundError:
                continue
            except ValueError:
                message = f"{path} is damaged ({path.stat().st_size} bytes, not valid JSON)"
                yield Problem("state", message, _document_fix(path, paths))


def _document_fix(path: Path, paths: Paths) -> str:
    if path.name == "before.json":
        consequence = "without it, `uninstall` leaves packages and settings in place"
        return f"restore the file from a backup; {consequence}"
    if path == paths.release(path.parent.name):
        return f"run the deploy; if the plan has no such release, run `rm -r {path.parent}`"
    return f"run `rm {path}`, then deploy again to write a new file"


def _proof_age_s(last: Proof | None) -> float | None:
    if last is None:
        return None
    try:
        checked = datetime.fromisoformat(last.checked_at.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (datetime.now(timezone.utc) - checked).total_seconds()


class _Part(NamedTuple):
    tree: Path
    name: str
    offset: int
    size_bytes: int
    sha256: str

    @property
    def key(self) -> str:
        return f"{self.tree / self.name}@{self.offset}"


def hash_next(
    trees: Iterable[Path], position: int, damaged: Collection[str] = ()
) -> tuple[dict[str, Problem], int]:
    """Hash the parts that were ``damaged`` before, then the next 1/14 of the bytes in ``trees``.

    Returns a problem for each damaged part, and the position of the next part.
    """
    parts = [part for tree in dict.fromkeys(trees) for part in _list_parts(tree)]
    to_hash = [part for part in parts if part.key in damaged]
    damaged_count = len(to_hash)
    remaining_bytes = sum(part.size_bytes for part in parts) / HASH_DAYS
    for _ in parts:
        if remaining_bytes <= 0:
            break
        part = parts[position % len(parts)]
        to_hash.append(part)
        remaining_bytes -= part.size_bytes
        position = (position + 1) % len(parts)
    deadline_s = time.monotonic() + _DAILY_LIMIT_S
    problems: dict[str, Problem] = {}
    for number, part in enumerate(to_hash):
        if number >= damaged_count and time.monotonic() > deadline_s:
            remaining_count = len(to_hash) - number
            return problems, (position - remaining_count) % len(parts)
        if problem := _verify_part(part):
            problems[part.key] = problem
    return problems, position


def _list_parts(tree: Path) -> Iterator[_Part]:
    receipt = receipts.find_receipt(tree)
    for file in receipt.files if receipt else ():
        offset = 0
        pieces = file.pieces or ()
        if not pieces and file.sha256:
            pieces = (f"{file.size_bytes}:{file.sha256}",)
        for piece in pieces:
            size, _, sha256 = piece.partition(":")
            yield _Part(tree, file.path, offset, int(size), sha256)
            offset += int(size)


def _verify_part(part: _Part) -> Problem | None:
    digest, end = hashlib.sha256(), part.offset + part.size_bytes
    try:
        with (part.tree / part.name).open("rb", buffering=0) as content:
            # Read from the disk, not from the page cache, and leave the memory to the engine.
            os.posix_fadvise(content.fileno(), part.offset, part.size_bytes, os.POSIX_FADV_DONTNEED)
            content.seek(part.offset)
            while chunk := content.read(min(_BUFFER_BYTES, end - content.tell())):
                digest.update(chunk)
            os.posix_fadvise(content.fileno(), part.offset, part.size_bytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        return _damage_problem(part, f"cannot be read ({error.strerror})")
    if digest.hexdigest() != part.sha256:
        where = f"the part that starts at byte {part.offset:,}"
        return _damage_problem(part, f"{where} does not match its checksum in the receipt")
    return None


def _damage_problem(part: _Part, message: str) -> Problem:
    file = part.tree / part.name
    # After `touch`, other checkpoints with a hard link to the file hash it again.
    command = f"touch {file}; rm {part.tree / RECEIPT_NAME}"
    fix = f"check the disk with smartctl and journalctl -k, run `{command}`, then deploy again"
    return Problem("checkpoint", f"{file} is damaged: {message}", fix)


def main(args: list[str], paths: Paths) -> int:
    host = Host(paths)
    result = inspect_host(host)
    for problem in result.problems:
        log(problem.line)
    host.disk.write(paths.daily, result)
    return 0
