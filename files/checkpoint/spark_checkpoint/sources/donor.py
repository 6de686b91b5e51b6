"""The FP8 donor: a local tree, or byte ranges of a repository at a pinned commit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spark_contract.fetching import Wire
from spark_contract.files import sync, write_all
from spark_contract.orders import DonorDir, DonorUrl

from spark_checkpoint.errors import GateRefused, TransferFailed
from spark_checkpoint.format.directory import INDEX_NAME, Span, json_object, read_checkpoint
from spark_checkpoint.format.headers import (
    Header,
    Tensor,
    header_json_bytes,
    parse_header,
    weight_map,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.sources.transport import Transport

# Bytes between two wanted ranges that are cheaper to read along than to ask around.
GAP_BYTES = 64 << 10
# A request this long is lost and repeated at most; more of them keep all connections busy.
REQUEST_LIMIT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class NamedRange:
    """Bytes ``[begin, end)`` of a file, wanted under a name."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Request:
    """One range to read, and the wanted pieces that lie whole inside it."""

    begin: int
    end: int
    pieces: tuple[NamedRange, ...]


def merge(
    wanted: Iterable[NamedRange], gap_bytes: int = GAP_BYTES, limit_bytes: int = REQUEST_LIMIT_BYTES
) -> list[Request]:
    """Return requests covering all wanted ranges; a piece is never split between two."""
    requests: list[Request] = []
    for piece in sorted(wanted, key=lambda item: (item.begin, item.end)):
        last = requests[-1] if requests else None
        if (
            last is not None
            and piece.begin - last.end <= gap_bytes
            and max(last.end, piece.end) - last.begin <= limit_bytes
        ):
            end = max(last.end, piece.end)
            requests[-1] = Request(last.begin, end, (*last.pieces, piece))
        else:
            requests.append(Request(piece.begin, piece.end, (piece,)))
    return requests


# A header's length stands before it. Guessing it instead would save a request of each shard and
# read half as much again as headers are large.
_LENGTH_BYTES = 8
_INDEX_LIMIT_BYTES = 256 << 20
# Of one repository, index and all headers: several times what 280,000 names take.
_LIMIT_BYTES = 512 << 20


def _may_be_asked_for(name: str) -> bool:
    """Whether a recipe can take this tensor: no routed expert, nine in ten names, outside MTP."""
    return ".mlp.experts." not in name or name.startswith("mtp.")


class DirDonor:
    """A donor tree on this host; nothing is copied."""

    def __init__(self, directory: Path):
        self._tree = read_checkpoint(directory)
        self.names = frozenset(self._tree.owner)  # with or without its routed experts
        self.received_bytes = 0  # over the network

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the header entries of the names."""
        return {name: self._tree.tensor(name) for name in names}

    def stage(self, names: Iterable[str], directory: Path, progress: Progress) -> dict[str, Span]:
        """Return where the bytes lie in the donor's own shards."""
        return {name: self._tree.span(name) for name in names}


class UrlFiles:
    """Files of a repository at one revision, read by headers and ranges."""

    def __init__(self, base_url: str, wire: Wire):
        self._base_url = base_url.rstrip("/") + "/"
        self.transport = Transport(wire, (self._base_url,))
        # A parsed header of thousands of names takes more than its bytes: one at a time.
        self._parsing = threading.Lock()

    def url(self, path: str) -> str:
        """Return the address of a file."""
        return self._base_url + quote(path)

    def small_json(self, url: str, limit_bytes: int) -> dict[str, Any]:
        """Return a small JSON object."""
        raw = self.transport.read_whole(url, limit_bytes)
        return json_object(raw, url, "check the repository")

    def index(self, keep: Callable[[str], bool] = lambda name: True) -> dict[str, str]:
        """Return name → shard of the names to keep, from the index."""
        raw = self.transport.read_whole(self.url(INDEX_NAME), _INDEX_LIMIT_BYTES)
        return weight_map(raw, self.url(INDEX_NAME), "check the repository", keep)

    def header(self, shard: str) -> Header:
        """Return the header of a shard: one request for its length, one for exactly its bytes."""
        url = self.url(shard)
        size, first = self.transport.read_start(url, _LENGTH_BYTES)
        end = _LENGTH_BYTES + header_json_bytes(first, size, url)
        if self.transport.received_bytes + end > _LIMIT_BYTES:
            what = f"its headers and those before come to more than {_LIMIT_BYTES} bytes"
            raise GateRefused(url, what, "check the repository")
        raw = self.transport.read(url, _LENGTH_BYTES, end, size)
        with self._parsing:
            return parse_header(raw, size, url)


class UrlDonor:
    """A donor on a hub: index, the headers of the shards needed, then only the ranges needed."""

    def __init__(self, plan: DonorUrl):
        self._files = UrlFiles(plan.url, plan)
        self._parallel = plan.parallel
        self._index = self._read_index()
        self._headers: dict[str, Header] = {}
        self.names = frozenset(self._index)

    @property
    def received_bytes(self) -> int:
        """Bytes that came over the network so far."""
        return self._files.transport.received_bytes

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the header entries of the names, reading headers not read before."""
        wanted = list(names)
        shards = sorted({self._index[name] for name in wanted} - self._headers.keys())
        with ThreadPoolExecutor(self._parallel) as pool:
            headers = pool.map(self._header, shards)
            self._headers.update(zip(shards, headers, strict=True))
        found = {}
        for name in wanted:
            entry = self._headers[self._index[name]].tensors.get(name)
            if entry is None:
                raise GateRefused(
                    self._files.url(self._index[name]),
                    f"does not hold {name}, which the donor's index puts there",
                    "use another commit of the donor",
                )
            found[name] = entry
        return found

    def stage(self, names: Iterable[str], directory: Path, progress: Progress) -> dict[str, Span]:
        """Read the ranges into files of ``directory``; files from an earlier try are reused."""
        wanted = list(names)
        self.tensors(wanted)
        directory.mkdir(exist_ok=True)
        by_shard: dict[str, list[NamedRange]] = {}
        for name in wanted:
            header = self._headers[self._index[name]]
            begin = header.file_offset(name)
            end = begin + header.tensors[name].size_bytes
            by_shard.setdefault(self._index[name], []).append(NamedRange(name, begin, end))
        jobs = [
            (shard, request) for shard in sorted(by_shard) for request in merge(by_shard[shard])
        ]
        progress.phase("donor", sum(request.end - request.begin for _, request in jobs))
        spans: dict[str, Span] = {}
        with ThreadPoolExecutor(self._parallel) as pool:
            try:
                for staged in pool.map(partial(self._stage_one, directory, progress), jobs):
                    spans.update(staged)
            except BaseException:
                self._files.transport.cancel()
                raise
        return spans

    def _stage_one(
        self, directory: Path, progress: Progress, job: tuple[str, Request]
    ) -> Mapping[str, Span]:
        shard, request = job
        size = request.end - request.begin
        path = directory / f"{shard}.{request.begin}-{request.end}"
        if path.exists() and path.stat().st_size == size:
            progress.skip(size)
        else:
            growing = path.with_name(path.name + ".part")
            fd = os.open(growing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                total = self._headers[shard].data_start + self._headers[shard].data_bytes
                for piece in self._files.transport.stream(
                    self._files.url(shard), request.begin, request.end, total
                ):
                    write_all(fd, piece)
                    progress.add(len(piece))
                sync(fd)
            finally:
                os.close(fd)
            growing.rename(path)
        return {
            piece.name: Span(path, piece.begin - request.begin, piece.end - piece.begin)
            for piece in request.pieces
        }

    def _header(self, shard: str) -> Header:
        header = self._files.header(shard)
        kept = {name: tensor for name, tensor in header.tensors.items() if _may_be_asked_for(name)}
        return header._replace(tensors=kept)

    def _read_index(self) -> dict[str, str]:
        url = self._files.url(INDEX_NAME)
        try:
            index = self._files.index(_may_be_asked_for)
        except TransferFailed as error:
            if "answers 404" not in error.what:
                raise
            return self._single_shard()
        for shard in set(index.values()):
            if "/" in shard or not shard.endswith(".safetensors"):
                raise GateRefused(url, f"names the odd shard {shard!r}", "check the donor")
        return index

    def _single_shard(self) -> dict[str, str]:
        shard = "model.safetensors"
        self._headers = {shard: self._files.header(shard)}
        return dict.fromkeys(self._headers[shard].tensors, shard)


Donor = DirDonor | UrlDonor


def open_donor(plan: DonorDir | DonorUrl) -> Donor:
    """Return the donor a plan names."""
    return UrlDonor(plan) if isinstance(plan, DonorUrl) else DirDonor(Path(plan.dir))
