"""Lists a host's files, folders and links as lines to compare; runs on the host's own Python.

``python3 - ROOT NAME...`` prints path, kind, mode, owner and content of each. It omits times,
durations and random ids in our records, the content of secrets, and the host's names.
"""

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
# Our documents with values that differ from run to run.
RECORDS = re.compile(r"/var/lib/spark/.*\.json|/srv/spark/.*/receipt\.json")
# Times, durations, measurements and random ids.
VARIES = re.compile(
    r"at|.*_at|last_lines|.*_ns|inode|id|.*_id|request|seconds|(start_)?times_s|bench|detail|progress|log_tail|"
    r"load_lines|start_memory|(cached|free)_(before|after)_bytes"
)
# The order of lines depends on the order of installation.
ACCOUNTS = re.compile(r"/etc/(passwd|group|gshadow)")
SECRET = re.compile(
    r"/etc/spark/api-key|/etc/shadow|/etc/ssh/ssh_host_.*|/etc/machine-id|.*/\.ssh/.*"
    r"|/etc/spark/share-key|/etc/docker/key\.json"
)
# Journals, caches, locks and backups of passwd.
LEFT_OUT = re.compile(
    r".*/__pycache__(/.*)?|/var/lib/spark/(events|daily\.json)(/.*)?|.*\.lock|/etc/ld\.so\.cache"
    r"|/etc/(passwd|group|shadow|gshadow)-|/var/lib/spark/jobs/[^/]*/(progress|tail)"
    r"|/etc/resolv\.conf|/var/lib/systemd/timers/(?!.*spark).*"
)


def lines(root: Path, own: tuple[str, ...] = ()) -> Iterator[str]:
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
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if not VARIES.fullmatch(key)}
    return [steady(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    rows = sorted(lines(Path(sys.argv[1]), tuple(sys.argv[2:])))
    sys.stdout.write("\n".join(rows) + "\n")
