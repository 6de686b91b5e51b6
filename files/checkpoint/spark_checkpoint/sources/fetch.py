"""Fetches one repository at one commit: every byte hashed while written, resumed inside files.

A file takes its name only after its hash was right and its bytes were flushed, so whatever has
its name needs no second look. What was interrupted stays as a ``.part`` that the next run
hashes again and continues.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

from spark_contract.fetching import FetchFile, FetchPlan
from spark_contract.files import now, sync, write_all
from spark_contract.receipts import ReceiptFile, SourceReceipt, why_not_ours

from spark_checkpoint import TOOL_VERSION
from spark_checkpoint.errors import BuilderError, GateRefused, TransferFailed
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.receipt import Proof, vouched, write_receipt
from spark_checkpoint.sources.connections import RangeIgnored
from spark_checkpoint.sources.lookup import (
    ContentHash,
    candidates,
    copy_hashed,
    hash_into,
    held,
    name_of,
)
from spark_checkpoint.sources.peers import Peers
from spark_checkpoint.sources.transport import Transport
from spark_checkpoint.storage import Passed, clear, refuse_without_room, stamp_of
from spark_checkpoint.verify import make_checkpoint


@dataclass(slots=True)
class _Order:
    """A fetch under way."""

    plan: FetchPlan
    transport: Transport
    peers: Peers
    progress: Progress
    tree_dir: Path
    parts_dir: Path
    proofs: dict[str, Proof] = field(default_factory=dict)

    def content(self, file: FetchFile) -> ContentHash:
        """Return the hashes to make of a file."""
        return ContentHash(file, with_pieces=self.plan.pieces)

    def part(self, file: FetchFile) -> Path:
        """Return where an unfinished file grows; paths of any depth become one name."""
        key = hashlib.sha256(f"{file.path}\0{file.sha256 or file.git_sha1}".encode()).hexdigest()
        return self.parts_dir / f"{key[:24]}.part"


def fetch(plan: FetchPlan, progress: Progress) -> bool:
    """Have the plan's tree on this host; return False when it was already there."""

    def write(work: Path, tree_dir: Path) -> None:
        # The last source is the hub itself: mirrors before it see no token.
        transport = Transport(plan, plan.urls[-1:])
        peers = Peers(plan, transport.stop)
        _write_tree(_Order(plan, transport, peers, progress, tree_dir, work / "parts"))

    return make_checkpoint(plan, f"{plan.name} at {plan.commit[:12]}", progress, write)


def _write_tree(order: _Order) -> None:
    """Write every file and the receipt."""
    plan = order.plan
    order.tree_dir.mkdir(exist_ok=True)
    order.parts_dir.mkdir(exist_ok=True)
    order.progress.phase("look", plan.size_bytes)
    missing = _use_local(order, _missing_files(order))
    clear(order.parts_dir, frozenset(order.part(file).name for file in missing))
    growing = sum(_size_or_zero(order.part(file)) for file in missing)
    needed = sum(file.size_bytes for file in missing) - growing
    refuse_without_room(order.tree_dir, max(0, needed), f"fetching {plan.name}")
    _download_all(order, missing)
    _drop_strangers(order)
    receipt = SourceReceipt(
        kind="source",
        digest=plan.digest,
        files=tuple(_entries(order)),
        tool_version=TOOL_VERSION,
        written_at=now(),
        name=plan.name,
        commit=plan.commit,
    )
    write_receipt(order.tree_dir, receipt)


def _missing_files(order: _Order) -> list[FetchFile]:
    """Return files that have not taken their name yet, and count the others as done."""
    missing = []
    for file in order.plan.files:
        path = order.tree_dir / file.path
        if (
            not path.is_file()
            or path.stat().st_size != file.size_bytes
            or why_not_ours(path) is not None
        ):
            missing.append(file)
            continue
        if file.sha256 is not None:
            # Proven when it took its name; a build that wants its pieces hashes it again.
            order.proofs[file.path] = Proof(file.sha256, ())
        else:
            order.proofs[file.path] = hash_into(path, order.content(file)).proof()
        order.progress.skip(file.size_bytes)
    return missing


def _use_local(order: _Order, missing: list[FetchFile]) -> list[FetchFile]:
    """Link or copy what is on this host already; return what is still missing."""
    if not order.plan.look_in or not missing:
        return missing
    by_size = candidates(missing, order.plan.look_in)
    return [file for file in missing if not _take_any(order, file, by_size[file.size_bytes])]


def _take_any(order: _Order, file: FetchFile, found: Mapping[Path, set[str]]) -> bool:
    """Take the first file that has the right content; those named by its hash are tried first."""
    hashes = {file.sha256, file.git_sha1}
    paths = sorted(found, key=lambda path: (not hashes & found[path], str(path)))
    return any(_take_local(order, file, path) for path in paths)


def _take_local(order: _Order, file: FetchFile, path: Path) -> bool:
    """Take one file of this host if its content is right; it is never moved or changed."""
    try:
        with held(path, file.size_bytes) as source:
            return _take_held(order, file, source, path)
    except OSError as error:
        note(f"look_in: {path}: {error.strerror}; not used")
    except TransferFailed as error:
        note(f"look_in: {error}; not used")
    return False


def _take_held(order: _Order, file: FetchFile, source: int, path: Path) -> bool:
    target = order.tree_dir / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    before, name = stamp_of(source), name_of(source)
    content = hash_into(name, order.content(file), order.progress.skip, file.size_bytes)
    if content.mismatch() is not None or stamp_of(source) != before:
        order.progress.skip(-file.size_bytes)
        return False
    target.unlink(missing_ok=True)
    try:
        if not os.fstat(source).st_mode & stat.S_IROTH:
            raise PermissionError(errno.EPERM, "not for everybody to read", str(path))
        if why_not_ours(source) is not None:
            raise PermissionError(errno.EPERM, "others could change it later", str(path))
        # With a folder's descriptor, which a whole name has no use for, Python follows the name.
        os.link(name, target, src_dir_fd=source, follow_symlinks=True)
    except OSError:
        # Another filesystem, one without hard links, a file that its owner keeps from the
        # engine's account or could write to later: copy, and trust only the copy.
        refuse_without_room(order.tree_dir, file.size_bytes, f"copying {path}")
        content = copy_hashed(name, order.part(file), order.content(file))
        if content.mismatch() is not None:
            return False
        order.part(file).rename(target)
    order.proofs[file.path] = content.proof()
    return True


def _download_all(order: _Order, missing: list[FetchFile]) -> None:
    order.progress.phase(
        "fetch",
        order.plan.size_bytes,
        done_bytes=order.plan.size_bytes - sum(file.size_bytes for file in missing),
    )
    # Large files first: the last to finish is then a small one.
    queue = sorted(missing, key=lambda file: (-file.size_bytes, file.path))
    with ThreadPoolExecutor(order.plan.parallel) as pool:
        try:
            list(pool.map(partial(_download, order), queue))
        except BaseException:
            order.transport.cancel()
            raise


def _download(order: _Order, file: FetchFile) -> None:
    """Bring one file from the first source that has the right bytes."""
    if file.size_bytes and order.peers.bring(file.path, partial(_download_from, order, file)):
        return
    failures: list[BuilderError] = []
    for base in order.plan.urls:
        url = base.rstrip("/") + "/" + quote(file.path, safe="/:")
        try:
            _download_from(order, file, order.transport, url)
            return
        except (GateRefused, TransferFailed) as error:
            failures.append(error)
            if len(order.plan.urls) > 1:
                note(f"source: {error}")
    if not failures:
        raise TransferFailed(file.path, "is in no place of look_in", "give urls too")
    refused = [failure for failure in failures if isinstance(failure, GateRefused)]
    raise (refused or failures)[-1]


def _download_from(order: _Order, file: FetchFile, transport: Transport, url: str) -> None:
    part = order.part(file)
    resumed = _size_or_zero(part) > 0
    try:
        content = _grow(order, file, transport, url, part)
        if content.mismatch() and resumed:
            # A power cut can leave a .part whose blocks never reached the disk.
            note(f"resume: {file.path}: the earlier part was damaged, fetching it whole")
            _discard(order, part)
            content = _grow(order, file, transport, url, part)
    except RangeIgnored:
        note(f"resume: {url} cannot continue, fetching it whole")
        _discard(order, part)
        content = _grow(order, file, transport, url, part)
    if (wrong := content.mismatch()) is not None:
        _discard(order, part)
        raise GateRefused(url, wrong, "lock the repository again, or use another source")
    target = order.tree_dir / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part.rename(target)
    order.proofs[file.path] = content.proof()


def _grow(
    order: _Order, file: FetchFile, transport: Transport, url: str, part: Path
) -> ContentHash:
    """Hash what is there and append the rest."""
    content = order.content(file)
    fd = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if stamp_of(fd).size_bytes > file.size_bytes:
            os.ftruncate(fd, 0)
        present = stamp_of(fd).size_bytes
        if present:
            hash_into(part, content, order.progress.skip)
            os.lseek(fd, present, os.SEEK_SET)
        passed = Passed(fd, present)
        pieces = transport.stream(url, present, file.size_bytes, file.size_bytes)
        for number, piece in enumerate(pieces):
            if number == 0:
                transport.refuse_other_content(url, file)
            content.update(piece)
            write_all(fd, piece)
            passed.go(len(piece))
            order.progress.add(len(piece))
        sync(fd)
        passed.all()
    finally:
        os.close(fd)
    return content


def _discard(order: _Order, part: Path) -> None:
    order.progress.add(-_size_or_zero(part))
    part.unlink(missing_ok=True)


def _drop_strangers(order: _Order) -> None:
    """Remove files an earlier order left in the partial tree; the receipt covers all or none."""
    ours = {file.path for file in order.plan.files}
    for path in list(order.tree_dir.rglob("*")):
        if path.is_file() and str(path.relative_to(order.tree_dir)) not in ours:
            path.unlink()


def _entries(order: _Order) -> list[ReceiptFile]:
    entries = []
    for file in sorted(order.plan.files, key=lambda file: file.path):
        proof = order.proofs[file.path]
        stamp = stamp_of(order.tree_dir / file.path)
        # A file of one piece is proven by its own hash.
        pieces = tuple(map(str, proof.pieces)) if len(proof.pieces) > 1 else None
        entries.append(vouched(file.path, stamp, proof.sha256, pieces))
    return entries


def _size_or_zero(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
