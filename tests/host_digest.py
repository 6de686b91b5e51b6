"""What a host holds of ours and of its system, as lines to compare; run on the host by its Python.

``python3 - ROOT NAME...`` prints one line for each file, folder and link: path, kind, mode, owner,
and what is in it. Of our records the values are left out that tell when and how fast, and ids drawn
anew; of random secrets the content, and in all files the host's own names. Everything else counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLACES = (
    "/etc", "/srv/spark", "/usr/local", "/var/lib/spark", "/root", "/home",
    "/var/lib/systemd/timers", "/var/lib/systemd/linger",
)  # fmt: skip
# Where documents of ours lie whose values may differ from one run to the next.
RECORDS = re.compile(r"/var/lib/spark/.*\.json|/srv/spark/.*/receipt\.json")
# When it was, how long it took, what was measured, and what is drawn anew each time.
VARIES = re.compile(
    r"at|.*_at|last_lines|.*_ns|inode|id|.*_id|request|seconds|times_s|bench|detail|progress|log_tail|"
    r"load_lines|start_memory|(cached|free)_(before|after)_bytes"
    r"|donor_received_bytes"  # a build that went on received less
)
# Their lines stand in the order in which accounts were made, which means nothing.
ACCOUNTS = re.compile(r"/etc/(passwd|group|gshadow)")
SECRET = re.compile(
    r"/etc/spark/api-key|/etc/shadow|/etc/ssh/ssh_host_.*|/etc/machine-id|.*/\.ssh/.*"
    r"|/etc/spark/share-key|/etc/docker/key\.json"
)
# Journals, caches and locks: what happened, not what is; backups of passwd name the step before.
LEFT_OUT = re.compile(
    r".*/__pycache__(/.*)?|/var/lib/spark/(events|daily\.json)(/.*)?|.*\.lock|/etc/ld\.so\.cache"
    r"|/etc/(passwd|group|shadow|gshadow)-|/var/lib/spark/jobs/[^/]*/(progress|tail)"
    r"|/etc/resolv\.conf|/var/lib/systemd/timers/(?!.*spark).*"
)


def lines(root: Path, own: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield what is below ``root``; words that are the host's own are left out of contents."""
    for place in PLACES:
        top = root / place[1:]
        for folder, folders, names in os.walk(top):
            folders.sort()
            for path in sorted(Path(folder) / name for name in (*folders, *names)):
                shown = "/" + str(path.relative_to(root))
                if not LEFT_OUT.fullmatch(shown):
                    yield _line(path, shown, own)


def _line(path: Path, shown: str, own: tuple[str, ...]) -> str:
    info = path.lstat()
    words = [shown, stat.filemode(info.st_mode), f"{info.st_uid}:{info.st_gid}"]
    if path.is_symlink():
        words.append(os.readlink(path))
    elif path.is_file():
        words.append("secret" if SECRET.fullmatch(shown) else _content(path, shown, own))
    return " ".join(words)


def _content(path: Path, shown: str, own: tuple[str, ...]) -> str:
    data = path.read_bytes()
    for word in own:
        data = data.replace(word.encode(), b"OWN")
    if ACCOUNTS.fullmatch(shown):
        data = b"\n".join(sorted(data.splitlines()))
    if RECORDS.fullmatch(shown):
        try:
            return json.dumps(steady(json.loads(data)), sort_keys=True)
        except ValueError:
            return f"malformed {data!r}"
    return hashlib.sha256(data).hexdigest()


def steady(value: Any) -> Any:
    """Return a document without what differs from run to run."""
    if isinstance(value, dict):
        return {key: steady(one) for key, one in value.items() if not VARIES.fullmatch(key)}
    return [steady(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    found = sorted(lines(Path(sys.argv[1]), tuple(sys.argv[2:])))
    sys.stdout.write("\n".join(found) + "\n")
