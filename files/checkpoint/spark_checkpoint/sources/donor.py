"""The FP8 donor: a local directory, or byte ranges of a repository at a pinned commit."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from spark_contract.builder_api import DonorUrl
from spark_contract.fetching import TransferOptions

from spark_checkpoint import ValidationError, headers
from spark_checkpoint.directory import INDEX_NAME, Span, read_checkpoint
from spark_checkpoint.progress import Progress
from spark_checkpoint.sources.client import HttpClient, NotFoundError
from spark_checkpoint.storage import write_durably

# Reading a gap of up to this size is cheaper than another request.
GAP_BYTES = 64 << 10
# A failed request loses at most this much; many requests keep all connections busy.
REQUEST_LIMIT_BYTES = 32 << 20
_LENGTH_BYTES = 8
_INDEX_LIMIT_BYTES = 256 << 20
# Limit for index and headers together; 280,000 names need a fraction of it.
_TOTAL_LIMIT_BYTES = 512 << 20


class NamedRange(NamedTuple):
    name: str
    begin: int
    end: int


class Request(NamedTuple):
    begin: int
    end: int
    ranges: tuple[NamedRange, ...]


def merge_ranges(
    ranges: Iterable[NamedRange], gap_bytes: int = GAP_BYTES, limit_bytes: int = REQUEST_LIMIT_BYTES
) -> list[Request]:
    """Return requests that cover all ranges; a range is never split."""
    requests: list[Request] = []
    for item in sorted(ranges, key=lambda item: (item.begin, item.end)):
        if requests:
            last = requests[-1]
            end = max(last.end, item.end)
            if item.begin - last.end <= gap_bytes and end - last.begin <= limit_bytes:
                requests[-1] = Request(last.begin, end, (*last.ranges, item))
                continue
        requests.append(Request(item.begin, item.end, (item,)))
    return requests


def _is_usable(name: str) -> bool:
    """Return whether a build can use a tensor; builds use routed experts only in MTP layers."""
    return ".mlp.experts." not in name or name.startswith("mtp.")


class DirDonor:
    def __init__(self, directory: Path):
        self._checkpoint = read_checkpoint(directory)
        self.names = frozenset(self._checkpoint.owner)

    def tensors(self, names: Iterable[str]) -> dict[str, headers.Tensor]:
        return {name: self._checkpoint.tensor(name) for name in names}

    def stage(self, names: Iterable[str], directory: Path, progress: Progress) -> dict[str, Span]:
        return {name: self._checkpoint.span(name) for name in names}


class RepositoryFiles:
    """Headers and ranges of a repository at a revision."""

    def __init__(self, base_url: str, transfer: TransferOptions, *, direct: bool = False):
        self._base_url = base_url.rstrip("/") + "/"
        self.client = HttpClient(transfer, (self._base_url,), direct=direct)
        # Headers are parsed one at a time, because they take much memory.
        self._parsing = threading.Lock()

    def url(self, path: str) -> str:
        return self._base_url + quote(path)

    def index(self, keep: Callable[[str], bool] = lambda name: True) -> dict[str, str]:
        """Read the index; return the shard of each tensor whose name satisfies ``keep``."""
        raw = self.client.read_whole(self.url(INDEX_NAME), _INDEX_LIMIT_BYTES)
        return headers.parse_weight_map(raw, self.url(INDEX_NAME), "check the repository", keep)

    def header(self, shard: str) -> headers.Header:
        url = self.url(shard)
        size, first = self.client.read_start(url, _LENGTH_BYTES)
        end = _LENGTH_BYTES + headers.header_json_bytes(first, size, url)
        if self.client.received_bytes + end > _TOTAL_LIMIT_BYTES:
            problem = f"the headers of the repository exceed {_TOTAL_LIMIT_BYTES} bytes"
            raise ValidationError(url, problem, "check the repository")
        raw = self.client.read(url, _LENGTH_BYTES, end, size)
        with self._parsing:
            return headers.parse_header(raw, size, url)


class UrlDonor:
    """A donor on a hub; reads only the index and the required headers and ranges."""

    def __init__(self, plan: DonorUrl, *, direct: bool = False):
        self._files = RepositoryFiles(plan.url, plan, direct=direct)
        self._parallel = plan.parallel
        self._headers: dict[str, headers.Header] = {}
        self._index = self._read_index()
        self.names = frozenset(self._index)

    def tensors(self, names: Iterable[str]) -> dict[str, headers.Tensor]:
        required = list(names)
        shards = sorted({self._index[name] for name in required} - self._headers.keys())
        with ThreadPoolExecutor(self._parallel) as pool:
            for shard, header in zip(shards, pool.map(self._files.header, shards), strict=True):
                usable = {
                    name: tensor for name, tensor in header.tensors.items() if _is_usable(name)
                }
                self._headers[shard] = header._replace(tensors=usable)
        tensors = {}
        for name in required:
            shard = self._index[name]
            if name not in self._headers[shard].tensors:
                problem = f"lacks {name}, which the index of the FP8 source lists in this file"
                fix = "use another commit of the FP8 source"
                raise ValidationError(self._files.url(shard), problem, fix)
            tensors[name] = self._headers[shard].tensors[name]
        return tensors

    def stage(self, names: Iterable[str], directory: Path, progress: Progress) -> dict[str, Span]:
        """Download tensors into a directory; reuse files that an earlier run has left there."""
        directory.mkdir(exist_ok=True)
        ranges_by_shard: dict[str, list[NamedRange]] = {}
        for name, tensor in self.tensors(names).items():
            shard = self._index[name]
            begin = self._headers[shard].file_offset(name)
            named_range = NamedRange(name, begin, begin + tensor.size_bytes)
            ranges_by_shard.setdefault(shard, []).append(named_range)
        jobs = [
            (shard, request)
            for shard, ranges in sorted(ranges_by_shard.items())
            for request in merge_ranges(ranges)
        ]
        progress.start_phase("donor", sum(request.end - request.begin for _, request in jobs))
        spans: dict[str, Span] = {}
        with ThreadPoolExecutor(self._parallel) as pool:
            try:
                for staged in pool.map(lambda job: self._stage(directory, progress, *job), jobs):
                    spans.update(staged)
            except BaseException:
                self._files.client.cancel()
                raise
        return spans

    def _stage(
        self, directory: Path, progress: Progress, shard: str, request: Request
    ) -> Mapping[str, Span]:
        size = request.end - request.begin
        path = directory / f"{shard}.{request.begin}-{request.end}"
        if path.exists() and path.stat().st_size == size:
            progress.skip(size)
        else:
            partial = path.with_name(path.name + ".part")
            file_bytes, url = self._headers[shard].file_bytes, self._files.url(shard)
            with write_durably(partial, os.O_TRUNC) as write:
                for chunk in self._files.client.stream(url, request.begin, request.end, file_bytes):
                    write(chunk)
                    progress.add(len(chunk))
            partial.rename(path)
        return {
            item.name: Span(path, item.begin - request.begin, item.end - item.begin)
            for item in request.ranges
        }

    def _read_index(self) -> dict[str, str]:
        try:
            index = self._files.index(_is_usable)
        except NotFoundError:
            shard = "model.safetensors"
            self._headers = {shard: self._files.header(shard)}
            return dict.fromkeys(self._headers[shard].tensors, shard)
        for shard in set(index.values()):
            if "/" in shard or not shard.endswith(".safetensors"):
                url = self._files.url(INDEX_NAME)
                fix = "use another donor"
                raise ValidationError(url, f"lists the invalid shard {shard!r}", fix)
        return index


Donor = DirDonor | UrlDonor
