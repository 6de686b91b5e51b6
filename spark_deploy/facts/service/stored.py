"""Weights that already lie on a host: those of root are linked and need no room again.

Only files whose content is known without reading it count: those of a hub cache, which are named
by their hash, and those a receipt of ours lists. Two commits of one model have shards of equal
size, so a size alone says nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from spark_contract.documents import DocumentError
from spark_contract.host.digests import SHA256
from spark_contract.host.paths import RECEIPT_NAME
from spark_contract.work import receipts

from spark_deploy.facts.sections import Sections

_HASH = re.compile(SHA256)
# In place of a device: somebody else could change the file, so the fetcher takes a copy of it.
COPIED = "-"
_GLOB = re.compile(r"([*?\[\]])")


@dataclass(frozen=True, slots=True)
class Stored:
    """Files of known content, and the filesystem each path of the plan is (or will be) on."""

    devices: dict[str, str] = field(default_factory=dict)  # path -> device number
    files: frozenset[tuple[str, str, int]] = frozenset()  # device number, sha256, bytes
    folders: dict[str, str] = field(default_factory=dict)  # sha256 -> cache or tree it lies in

    def linkable_bytes(self, path: str, wanted: Iterable[tuple[str, int]]) -> int:
        """Add up the ``wanted`` (sha256, bytes) that a hard link can bring to ``path``."""
        device = self.devices.get(path, "")
        return sum(size for sha256, size in set(wanted) if (device, sha256, size) in self.files)


def script(paths: Sequence[str], look_in: Sequence[str]) -> str:
    """List large files and receipts below ``look_in``, and the devices of ``paths``.

    Args:
        paths: folders that are to be filled; one that does not exist yet counts as its parent.
        look_in: folders on the host, as shell globs.
    """
    if not look_in:
        return ""
    words = " ".join(shlex.quote(path) for path in paths)
    roots = " ".join(_globbed(pattern) for pattern in look_in)
    return rf"""
echo '== stored'
for path in {words}; do
  there=$path
  while [ ! -d "$there" ]; do there=$(dirname "$there"); done
  printf 'device\t%s\t%s\n' "$path" "$(stat -c %d "$there")"
done
for root in {roots}; do
  [ -d "$root" ] || continue
  list() {{
    timeout 20 find "$@" -type f -size +1023k \
      \( -user root -perm -004 ! -perm /022 -printf 'file\t%D\t%s\t%p\n' \
      -o -printf 'file\t{COPIED}\t%s\t%p\n' \)
  }}
  list "$root" ! -path '*/blobs/??/*'
  # Blobs that repositories of a cache share have another name; the links to them are named right.
  list -L "$root" -maxdepth 3 -path '*/blobs/*' -xtype l
  for receipt in "$root"/{RECEIPT_NAME} "$root"/*/{RECEIPT_NAME}; do
    [ -f "$receipt" ] || continue
    printf 'receipt\t%s\t' "${{receipt%/{RECEIPT_NAME}}}"
    tr -d '\n' < "$receipt"
    echo
  done
done
"""


def _globbed(pattern: str) -> str:
    """Quote everything of a pattern but what the shell shall expand."""
    parts = _GLOB.split(pattern)
    return "".join(part if _GLOB.fullmatch(part) else shlex.quote(part) for part in parts if part)


def parse(sections: Sections) -> Stored:
    """Read the ``stored`` section."""
    devices, files, receipts = {}, [], []
    for line in sections.get("stored", ()):
        kind, *fields = line.split("\t", 3)
        if kind == "device" and len(fields) == 2:
            devices[fields[0]] = fields[1]
        elif kind == "file" and len(fields) == 3 and fields[1].isdigit():
            files.append((fields[0], int(fields[1]), fields[2]))
        elif kind == "receipt" and len(fields) == 2:
            receipts.append((fields[0], fields[1]))
    listed = {path: sha256 for home, text in receipts for path, sha256 in _listed(home, text)}
    known, folders = [], {}
    for device, size, path in files:
        name = path.rpartition("/")[2]
        sha256 = name if _HASH.fullmatch(name) else listed.get((path, size))
        if sha256:
            known.append((device, sha256, size))
            folders[sha256] = _folder(path)
    return Stored(devices, frozenset(known), folders)


def _folder(path: str) -> str:
    """Return the hub's cache that a file lies in, or the folder of its tree."""
    cache, mark, _ = path.partition("/models--")
    return cache if mark else path.rpartition("/")[0]


def _listed(home: str, text: str) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield path and size → sha256 of what a receipt lists; a damaged one lists nothing."""
    with suppress(DocumentError):
        for file in receipts.parse(text).files:
            if file.sha256 is not None:
                yield (f"{home}/{file.path}", file.size_bytes), file.sha256
