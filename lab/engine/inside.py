"""Runs the engine's Python on this machine, on any distribution.

The two trees form a root in a separate mount namespace. The working directory, /tmp and the
colon-separated directories of SPARK_LAB_ENGINE_BIND keep their paths.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lab.paths import lab_paths

VENV = "opt/vllm"
ENVIRONMENT = {
    "PATH": f"/{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    # vLLM's sampler compiles C++ on its first request, even with --enforce-eager; there is
    # no compiler in the image.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

# Unmount guests' disks, which this mount namespace would keep busy.
_ENTER = """\
set -e
guests=$1; shift
for point in $(awk -v below="$guests/" 'index($5, below) == 1 {print $5}' /proc/self/mountinfo |
    sort -r); do umount -l "$point"; done
root=$1 rootfs=$2 venv=$3 workdir=$4 binds=$5; shift 5
mount -t tmpfs tmpfs "$root"
mkdir "$root/upper" "$root/work" "$root/root"
mount -t overlay overlay -o "lowerdir=$rootfs,upperdir=$root/upper,workdir=$root/work" "$root/root"
root=$root/root
mkdir -p "$root/opt/vllm"
mount --bind "$venv" "$root/opt/vllm"
for path in proc sys dev tmp; do mount --rbind "/$path" "$root/$path"; done
IFS=:
for path in $binds; do mkdir -p "$root$path"; mount --bind "$path" "$root$path"; done
unset IFS
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$workdir" "$@"
"""


def enter(rootfs: Path, venv: Path, argv: list[str]) -> NoReturn:
    workdir = Path.cwd()
    binds = {str(workdir), *filter(None, os.environ.get("SPARK_LAB_ENGINE_BIND", "").split(":"))}
    words = inside(rootfs, venv, sorted(binds), argv, workdir)
    os.execvpe(words[0], words, {**os.environ, **ENVIRONMENT})


def inside(
    rootfs: Path, venv: Path, binds: Sequence[str], argv: Sequence[str], workdir: Path
) -> list[str]:
    root = Path("/run/spark-lab-engine")
    root.mkdir(parents=True, exist_ok=True)
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "sh"]
    words += [str(lab_paths().guests), str(root), str(rootfs), str(venv), str(workdir)]
    return [*words, ":".join(binds), f"/{VENV}/bin/python", *argv]
