"""Download a repository at a commit, or the blobs of an image; resume inside files.

A file gets its final name after its hash has matched and its bytes are on disk. Names of partial
files end in ``.part``; the next run hashes these files and resumes.
"""

import errno
import hashlib
import json
import os
import platform
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spark_contract import fetching
from spark_contract.files import now, write_chunks
from spark_contract.receipts import SourceReceipt, why_writable_by_others

from spark_checkpoint import TOOL_VERSION, BuilderError, TransferError, ValidationError, storage
from spark_checkpoint.directory import parse_object
from spark_checkpoint.progress import Progress, note
from spark_checkpoint.sources.client import HttpClient, RangeUnsupportedError
from spark_checkpoint.sources.connections import SKIP_S, SlowSourceError
from spark_checkpoint.sources.peers import Peers
from spark_checkpoint.storage import ContentHash, FileHashes, find_candidates, pin_file
from spark_checkpoint.verify import create_checkpoint, receipt_entry, write_receipt

_MANIFEST_LIMIT_BYTES = 4 << 20
_MAX_CANDIDATES = 3  # per required file, because other users may add any number of files


def fetch(plan: fetching.FetchPlan, progress: Progress) -> None:

    def write(work: Path, result_dir: Path) -> None:
        # Only the last source, the hub, receives the token.
        client = HttpClient(plan, plan.urls[-1:])
        peers = Peers(plan, client.stop)
        _Download(plan, client, peers, progress, result_dir, work / "parts").run()

    create_checkpoint(plan, f"{plan.name} at {plan.commit[:12]}", progress, write)


@dataclass(slots=True)
class _Download:
    plan: fetching.FetchPlan
    client: HttpClient
    peers: Peers
    progress: Progress
    result_dir: Path
    parts_dir: Path
    hashes: dict[str, FileHashes] = field(default_factory=dict)
    skipped_until: dict[str, float] = field(default_factory=dict)  # slow sources by address

    def run(self) -> None:
        plan = self.plan
        self.result_dir.mkdir(exist_ok=True)
        self.parts_dir.mkdir(exist_ok=True)
        self.progress.start_phase("search", plan.size_bytes)
        missing = self._find_missing()
        if plan.look_in and missing:
            by_size = find_candidates(missing, plan.look_in)
            missing = [file for file in missing if not self._use_local(file, by_size)]
        storage.clear(self.parts_dir, frozenset(self._part_path(file).name for file in missing))
        present_bytes = sum(_size_or_zero(self._part_path(file)) for file in missing)
        needed_bytes = sum(file.size_bytes for file in missing) - present_bytes
        storage.check_free_space(self.result_dir, max(0, needed_bytes), f"fetching {plan.name}")
        self._download_all(missing)
        planned = {file.path for file in plan.files}
        for path in list(self.result_dir.rglob("*")):
            if path.is_file() and str(path.relative_to(self.result_dir)) not in planned:
                path.unlink()
        self._write_receipt()

    def _write_receipt(self) -> None:
        entries = []
        for file in sorted(self.plan.files, key=lambda file: file.path):
            sha256, pieces, _ = self.hashes[file.path]
            # The hash of a single piece would repeat the hash of the file.
            piece_lines = tuple(map(str, pieces)) if len(pieces) > 1 else None
            stamp = storage.read_stamp(self.result_dir / file.path)
            entries.append(receipt_entry(file.path, stamp, sha256, piece_lines))
        receipt = SourceReceipt(
            kind="source",
            digest=self.plan.digest,
            files=tuple(entries),
            tool_version=TOOL_VERSION,
            written_at=now(),
            name=self.plan.name,
            commit=self.plan.commit,
        )
        write_receipt(self.result_dir, receipt)

    def _new_hash(self, file: fetching.FetchFile) -> ContentHash:
        return ContentHash(file, with_pieces=self.plan.pieces)

    def _part_path(self, file: fetching.FetchFile) -> Path:
        key = hashlib.sha256(f"{file.path}\0{file.sha256 or file.git_sha1}".encode()).hexdigest()
        return self.parts_dir / f"{key[:24]}.part"

    def _target_path(self, file: fetching.FetchFile) -> Path:
        target = self.result_dir / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _find_missing(self) -> list[fetching.FetchFile]:
        """Return the missing files; record the hashes of the others."""
        missing = []
        for file in self.plan.files:
            path = self.result_dir / file.path
            is_complete = path.is_file() and path.stat().st_size == file.size_bytes
            if not is_complete or why_writable_by_others(path) is not None:
                missing.append(file)
                continue
            if file.sha256 is not None:
                self.hashes[file.path] = FileHashes(file.sha256, ())
            else:
                hasher = self._new_hash(file)
                hasher.update_from(path)
                self.hashes[file.path] = hasher.hashes()
            self.progress.skip(file.size_bytes)
        return missing

    def _use_local(
        self, file: fetching.FetchFile, by_size: Mapping[int, Mapping[Path, set[str]]]
    ) -> bool:
        names_by_path = by_size[file.size_bytes]
        hashes, name = {file.sha256, file.git_sha1}, Path(file.path).name

        # Try files named after a hash first, as in a hub cache, then files with the same name.
        def priority(path: Path) -> tuple[bool, bool, str]:
            names = names_by_path[path]
            return hashes.isdisjoint(names), name not in names, str(path)

        paths = sorted(names_by_path, key=priority)
        return any(self._use_candidate(file, path) for path in paths[:_MAX_CANDIDATES])

    def _use_candidate(self, file: fetching.FetchFile, path: Path) -> bool:
        try:
            with pin_file(path, file.size_bytes) as source:
                return self._link_or_copy(file, source, path)
        except OSError as error:
            note(f"look_in: skipping {path}: {error.strerror}")
        except TransferError as error:
            note(f"look_in: skipping a file: {error}")
        return False

    def _link_or_copy(self, file: fetching.FetchFile, source_fd: int, path: Path) -> bool:
        target = self._target_path(file)
        stamp, source_path = storage.read_stamp(source_fd), Path(f"/proc/self/fd/{source_fd}")
        hasher = self._new_hash(file)
        hasher.update_from(source_path, self.progress.skip, file.size_bytes)
        if hasher.mismatch() is not None or storage.read_stamp(source_fd) != stamp:
            self.progress.skip(-file.size_bytes)
            return False
        target.unlink(missing_ok=True)
        # Link only a file that everyone can read and only root can change; otherwise copy it.
        try:
            if not os.fstat(source_fd).st_mode & stat.S_IROTH:
                raise PermissionError(errno.EPERM, "not readable by everyone", str(path))
            if why_writable_by_others(source_fd) is not None:
                raise PermissionError(errno.EPERM, "other accounts can change the file", str(path))
            # Only with src_dir_fd does Python follow the link in /proc.
            os.link(source_path, target, src_dir_fd=source_fd, follow_symlinks=True)
        except OSError:
            # A copy does not need the same filesystem, hard links or the right permissions.
            storage.check_free_space(self.result_dir, file.size_bytes, f"copying {path}")
            hasher = self._new_hash(file)
            with storage.write_durably(self._part_path(file), os.O_TRUNC) as write:
                for buffer in storage.read_buffers(source_path, 0, file.size_bytes):
                    hasher.update(buffer)
                    write(buffer)
            if hasher.mismatch() is not None:
                return False
            self._part_path(file).rename(target)
        self.hashes[file.path] = hasher.hashes()
        return True

    def _download_all(self, missing: list[fetching.FetchFile]) -> None:
        total_bytes = self.plan.size_bytes
        done_bytes = total_bytes - sum(file.size_bytes for file in missing)
        self.progress.start_phase("fetch", total_bytes, done_bytes=done_bytes)
        queue = sorted(missing, key=lambda file: (-file.size_bytes, file.path))
        with ThreadPoolExecutor(self.plan.parallel) as pool:
            try:
                list(pool.map(self._download, queue))
            except BaseException:
                self.client.cancel()
                raise

    def _download(self, file: fetching.FetchFile) -> None:
        if file.size_bytes and self.peers.fetch(file, partial(self._download_from, file)):
            return
        failures: list[BuilderError] = []
        has_mirrors = len(self.plan.urls) > 1
        if has_mirrors and self._try_urls(file, self.client.for_first_pass(), failures=[]):
            return
        if self._try_urls(file, self.client, failures):
            return
        if not failures:
            problem = "is missing from all directories in look_in"
            raise TransferError(file.path, problem, "also set urls")
        mismatches = [failure for failure in failures if isinstance(failure, ValidationError)]
        raise (mismatches or failures)[-1]

    def _try_urls(
        self, file: fetching.FetchFile, client: HttpClient, failures: list[BuilderError]
    ) -> bool:
        """Download a file from the first working mirror or the hub; add errors to ``failures``."""
        for base in self.plan.urls:
            if client is not self.client and time.monotonic() < self.skipped_until.get(base, 0.0):
                continue
            url = base.rstrip("/") + "/" + quote(file.path, safe="/:")
            try:
                self._download_from(file, client, url)
                return True
            except (ValidationError, TransferError) as error:
                if client.stop.is_set():
                    raise
                if isinstance(error, SlowSourceError | ValidationError):
                    self.skipped_until[base] = time.monotonic() + SKIP_S
                failures.append(error)
                if len(self.plan.urls) > 1:
                    note(f"source: {error}")
        return False

    def _download_from(self, file: fetching.FetchFile, client: HttpClient, url: str) -> None:
        part = self._part_path(file)
        is_resumed = _size_or_zero(part) > 0

        def restart(reason: str) -> ContentHash:
            note(f"downloading the whole file again: {reason}")
            self._discard(part)
            return self._continue_part(file, client, url, part)

        try:
            hasher = self._continue_part(file, client, url, part)
            if hasher.mismatch() and is_resumed:
                # After a power cut a partial file can lack blocks that never reached the disk.
                hasher = restart(f"{file.path}: the partial file is damaged")
        except RangeUnsupportedError:
            hasher = restart(f"{url} does not support ranges")
        if (mismatch := hasher.mismatch()) is not None:
            self._discard(part)
            raise ValidationError(url, mismatch, "lock the repository again, or use another source")
        part.rename(self._target_path(file))
        self.hashes[file.path] = hasher.hashes()

    def _continue_part(
        self, file: fetching.FetchFile, client: HttpClient, url: str, part: Path
    ) -> ContentHash:
        hasher = self._new_hash(file)
        present_bytes = _size_or_zero(part)
        if present_bytes > file.size_bytes:
            os.truncate(part, 0)
            present_bytes = 0
        if present_bytes:
            hasher.update_from(part, self.progress.skip)
        with storage.write_durably(part, 0, present_bytes) as write:
            chunks = client.stream(url, present_bytes, file.size_bytes, file.size_bytes)
            for number, chunk in enumerate(chunks):
                if number == 0:
                    client.check_announcement(url, file)
                hasher.update(chunk)
                write(chunk)
                self.progress.add(len(chunk))
        return hasher

    def _discard(self, part: Path) -> None:
        self.progress.add(-_size_or_zero(part))
        part.unlink(missing_ok=True)


def _size_or_zero(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def fetch_layers(plan: fetching.LayersPlan, manifests: Path, progress: Progress) -> None:
    """Download an image's blobs for this machine, and write its manifests to a directory.

    Blobs may come from peers, but manifests always come from the registry.
    """
    reference = fetching.parse_reference(plan.reference)
    base = reference.base_url(plain=plan.plain)
    client = HttpClient(plan, (base,), accept=", ".join(fetching.MANIFEST_TYPES))
    manifests.mkdir(parents=True, exist_ok=True)
    bodies = list(_read_manifests(client, base, reference.version))
    for digest, body in bodies:
        write_chunks(manifests / digest, (body,))
    manifest = json.loads(bodies[-1][1])
    try:
        blobs = [manifest["config"], *manifest["layers"]]
        sizes = {str(blob["digest"]): int(blob["size"]) for blob in blobs}
    except (KeyError, TypeError, ValueError) as error:
        problem = f"the manifest has no valid list of blobs ({error!r})"
        raise ValidationError(plan.reference, problem, "check the registry") from error
    blobs_plan = fetching.FetchPlan(
        **{option.name: getattr(plan, option.name) for option in fields(fetching.TransferOptions)},
        digest=plan.digest,
        name=plan.reference,
        commit=reference.version.removeprefix("sha256:")[:40],
        out=plan.out,
        files=tuple(
            fetching.FetchFile(digest, size, digest.removeprefix("sha256:"))
            for digest, size in sizes.items()
        ),
        urls=(f"{base}/blobs",),
        peers=plan.peers,
        pieces=False,
        look_in=(),
    )
    fetch(blobs_plan, progress)


def _read_manifests(client: HttpClient, base: str, digest: str) -> Iterator[tuple[str, bytes]]:
    """Yield the digests and bodies of the list of platforms, if any, and of the manifest."""
    url = f"{base}/manifests/{digest}"
    body = client.read_whole(url, _MANIFEST_LIMIT_BYTES)
    actual = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if actual != digest:
        raise ValidationError(url, f"has digest {actual}", "check whether a proxy changes the data")
    yield digest, body
    manifest: Mapping[str, Any] = parse_object(body, digest, "check the registry")
    entries = manifest.get("manifests")
    if entries is None:
        return
    machine = fetching.ARCHITECTURES.get(platform.machine(), platform.machine())
    for entry in entries if isinstance(entries, list) else ():
        target = entry.get("platform") or {}
        if (target.get("os"), target.get("architecture")) == ("linux", machine):
            yield from _read_manifests(client, base, str(entry["digest"]))
            return
    raise ValidationError(
        digest, f"has no linux/{machine} image", "use an image that supports this platform"
    )
