"""What tests of lending look at: what the hub sent by its own log, and links made slow."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.labkit import STATE, Guest

ACCESS_LOG = STATE / "run" / "hub-access.jsonl"
REGISTRY_LOG = STATE / "run" / "registry.log"
# Apache's combined format, which the registry writes.
PULLED = re.compile(r'^(\S+) .* "GET /v2/\S+/blobs/(sha256:\S+) \S+" 20[06] (\d+) ')
BLOB = re.compile(r"/blobs/([0-9a-f]{64})\?")
FROM_HUB = ("match", "ip", "src", "10.77.0.1", "match", "ip", "sport", "8083", "0xffff")


class Sent:
    """What the hub sent of a repository's large files since this was made, by its own log."""

    def __init__(self, repository: str = "tiny-int4"):
        self._begun = ACCESS_LOG.stat().st_size
        self._sizes = {
            hashlib.sha256(path.read_bytes()).hexdigest(): path.stat().st_size
            for path in (STATE / "hub/lab" / repository).glob("*/*")
        }

    def to(self, guest: Guest) -> list[tuple[int, int]]:
        """Return first and last byte of every answer to this guest."""
        with ACCESS_LOG.open() as lines:
            lines.seek(self._begun)
            asked = [json.loads(line) for line in lines]
        found = []
        for one in asked:
            blob = BLOB.match(one["path"])
            if blob and blob[1] in self._sizes and one["client"] == guest.ip:
                last = self._sizes[blob[1]] - 1
                words = (one["range"] or f"bytes=0-{last}")[6:].split("-")
                found.append((int(words[0]), min(int(words[1]), last)))
        return found

    def bytes_to(self, guest: Guest) -> int:
        return sum(last - first + 1 for first, last in self.to(guest))


class Pulled:
    """What the registry sent of blobs since this was made, by its own log."""

    def __init__(self) -> None:
        self._begun = REGISTRY_LOG.stat().st_size

    def by(self, guest: Guest) -> dict[str, int]:
        """Return the bytes of each blob that went to a guest."""
        with REGISTRY_LOG.open() as lines:
            lines.seek(self._begun)
            found = [line for text in lines if (line := PULLED.match(text))]
        sent: dict[str, int] = {}
        for client, blob, size in (line.groups() for line in found):
            if client == guest.ip:
                sent[blob] = sent.get(blob, 0) + int(size)
        return sent


@contextmanager
def slow(link: str, rate: str, *matches: Sequence[str]) -> Iterator[None]:
    """Have what matches leave a link slowly, all of it together; the rest is as fast as ever."""
    tc(f"qdisc add dev {link} root handle 1: htb default 1")
    try:
        tc(f"class add dev {link} parent 1: classid 1:1 htb rate 10gbit quantum 60000")
        tc(f"class add dev {link} parent 1: classid 1:3 htb rate {rate}")
        for match in matches:
            words = f"filter add dev {link} parent 1: protocol ip u32 {' '.join(match)}"
            tc(f"{words} flowid 1:3")
        yield
    finally:
        tc(f"qdisc del dev {link} root")


def tc(words: str) -> None:
    subprocess.run(["tc", *words.split()], check=True, timeout=20)
