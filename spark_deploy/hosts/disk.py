"""Disk usage, and weights that can be linked instead of downloaded.

Only files with a known hash count, because shards of different commits have equal sizes.
"""

import json
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from spark_contract import receipts
from spark_contract.documents import DocumentError
from spark_contract.paths import RECEIPT_NAME
from spark_contract.units import SHA256


@dataclass(frozen=True, slots=True)
class DiskUsage:
    path: str
    present_bytes: int
    mount: str
    device: str
    available_bytes: int
    folder: str = ""


@dataclass(frozen=True, slots=True)
class ParentDirectory:
    """A parent directory; a user who can write to it can replace its content."""

    path: str
    owner: str
    group: str
    mode: int

    @property
    def write_risk(self) -> str:
        """Return why users other than root can write here; "" if they cannot."""
        if self.owner != "root":
            return f"{self.owner} owns this directory"
        if self.mode & stat.S_ISVTX:  # sticky: other users cannot replace root's entries
            return ""
        if self.mode & stat.S_IWOTH:
            return "every user can write to this directory"
        if self.mode & stat.S_IWGRP and self.group != "root":
            return f"group {self.group} can write to this directory"
        return ""


# Docker stores images in the data root or in containerd's store.
_IMAGE_STORE = r"""
image_store=
command -v docker >/dev/null 2>&1 && image_store=$(
  timeout 20 docker info --format '{{.DockerRootDir}}|{{range .DriverStatus}}{{.}}{{end}}')
case $image_store in
  *io.containerd.snapshotter*)
    image_store=$(timeout 20 containerd config dump | sed -n "s/^root *= *[\"']\(.*\)[\"']/\1/p")
    image_store=${image_store:-/var/lib/containerd} ;;
esac
image_store=${image_store%%|*}
"""


def disk_script(paths: Sequence[str], docker_dirs: Sequence[str] = ()) -> str:
    """Return a script that prints the filesystem of each path or its nearest existing parent."""
    quoted_paths = " ".join(shlex.quote(path) for path in dict.fromkeys(paths))
    in_docker = "|".join(shlex.quote(path) for path in docker_dirs) or "''"
    return rf"""
{_IMAGE_STORE}
echo '== paths'
for path in {quoted_paths}; do
  folder=$path
  case $path in {in_docker}) folder=${{image_store:-$path}} ;; esac
  existing=$folder
  while [ ! -d "$existing" ]; do existing=$(dirname "$existing"); done
  used=0
  case $path in
    {in_docker}) ;;
    *) [ -d "$path" ] && used=$(du -sk --apparent-size "$path" | cut -f1) ;;
  esac
  df -Pk "$existing" | awk -v path="$path" -v used="$used" -v folder="$folder" \
    'NR == 2 {{ mount = $6; for (i = 7; i <= NF; i++) mount = mount " " $i
      print path "\t" used "\t" $1 "\t" $4 "\t" mount "\t" folder }}'
done
echo '== parents'
for path in {quoted_paths}; do
  for parent in "$path" "$(realpath -m -- "$path")"; do
    while [ -n "$parent" ]; do parent=${{parent%/*}}; echo "${{parent:-/}}"; done
  done
done | sort -u | xargs -rd '\n' stat -L -c '%U/%G/%a/%n' -- 2>/dev/null
echo '== read-only'
for path in /etc /usr/local /var/lib {quoted_paths}; do
  while [ ! -d "$path" ]; do path=$(dirname "$path"); done
  [ -w "$path" ] || echo "$path"
done | sort -u
echo '== docker-df'
command -v docker >/dev/null 2>&1 && timeout 20 docker system df --format '{{{{json .}}}}'
"""


def parse_disk_usage(lines: Iterable[str]) -> Iterator[DiskUsage]:
    for line in lines:
        fields = line.split("\t")
        if len(fields) in (5, 6) and fields[1].isdigit() and fields[3].isdigit():
            path, used_kib, device, available_kib, mount, *folder = fields
            yield DiskUsage(
                path, int(used_kib) * 1024, mount, device, int(available_kib) * 1024, *folder
            )


def parse_parents(lines: Iterable[str]) -> Iterator[ParentDirectory]:
    for line in lines:
        owner, group, mode, path = [*line.split("/", 3), "", "", ""][:4]
        if path.startswith("/") and re.fullmatch("[0-7]{1,5}", mode):
            yield ParentDirectory(path, owner, group, int(mode, 8))


def parse_reclaimable(lines: Iterable[str]) -> dict[str, int]:
    sizes = {}
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)
            size = re.match(r"([\d.]+)([kKMGT]?B)( |$)", str(row.get("Reclaimable", "")))
            if size and float(size[1]):
                kind, unit = str(row.get("Type", "")).lower(), size[2]
                sizes[kind] = int(float(size[1]) * _UNITS[unit])
    return sizes


_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


# The script prints this instead of a device for files that other users can change: a deploy copies
# them, because a hard link would not protect the content.
COPIED = "-"
_NO_GLOB = re.compile(r"[^*?\[\]]+")


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Files with a known hash, and the devices of planned paths."""

    devices: dict[str, str] = field(default_factory=dict)  # path -> device number
    files: frozenset[tuple[str, str, int]] = frozenset()  # device number, sha256, bytes
    folders: dict[str, str] = field(default_factory=dict)  # sha256 -> cache or checkpoint

    def linkable_bytes(self, path: str, files: Iterable[tuple[str, int]]) -> int:
        device = self.devices.get(path, "")
        return sum(size for sha256, size in set(files) if (device, sha256, size) in self.files)


def stored_script(paths: Sequence[str], look_in: Sequence[str]) -> str:
    """Return a script that lists model files below ``look_in``, and the hashes in receipts."""
    if not look_in:
        return ""
    quoted_paths = " ".join(shlex.quote(path) for path in paths)
    roots = " ".join(_NO_GLOB.sub(lambda match: shlex.quote(match[0]), glob) for glob in look_in)
    return rf"""
echo '== stored'
for path in {quoted_paths}; do
  existing=$path
  while [ ! -d "$existing" ]; do existing=$(dirname "$existing"); done
  printf 'device\t%s\t%s\n' "$path" "$(stat -c %d "$existing")"
done
for root in {roots}; do
  [ -d "$root" ] || continue
  list() {{
    timeout 20 find "$@" -type f -size +1023k \
      \( -user root -perm -004 ! -perm /022 -printf 'file\t%D\t%s\t%p\n' \
      -o -printf 'file\t{COPIED}\t%s\t%p\n' \)
  }}
  list "$root" ! -path '*/blobs/??/*'
  # Shared blobs of a cache are not named by hash, but the links to them are.
  list -L "$root" -maxdepth 3 -path '*/blobs/*' -xtype l
  for receipt in "$root"/{RECEIPT_NAME} "$root"/*/{RECEIPT_NAME}; do
    [ -f "$receipt" ] || continue
    printf 'receipt\t%s\t' "${{receipt%/{RECEIPT_NAME}}}"
    tr -d '\n' < "$receipt"
    echo
  done
done
"""


def parse_stored(lines: Iterable[str]) -> StoredFiles:
    """Return the files whose hash is known, because it is their name or is in a receipt."""
    devices, files = {}, []
    receipt_hashes: dict[tuple[str, int], str] = {}  # path and size -> sha256
    for line in lines:
        match line.split("\t", 3):
            case ["device", path, device]:
                devices[path] = device
            case ["file", device, digits, path] if digits.isdigit():
                files.append((device, int(digits), path))
            case ["receipt", folder, text]:
                with suppress(DocumentError):
                    for file in receipts.parse(text).files:
                        if file.sha256 is not None:
                            receipt_hashes[f"{folder}/{file.path}", file.size_bytes] = file.sha256
    hashed_files, folders = [], {}
    for device, size, path in files:
        folder, _, name = path.rpartition("/")
        sha256 = name if re.fullmatch(SHA256, name) else receipt_hashes.get((path, size))
        if sha256:
            hashed_files.append((device, sha256, size))
            cache, marker, _ = path.partition("/models--")
            folders[sha256] = cache if marker else folder
    return StoredFiles(devices, frozenset(hashed_files), folders)
