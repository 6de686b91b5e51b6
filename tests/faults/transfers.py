"""Traffic of hub and registry, read from their logs, and rate limits for links."""

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.labkit import STATE, Guest

ACCESS_LOG = STATE / "run" / "hub-access.jsonl"
REGISTRY_LOG = STATE / "run" / "registry.log"
PULLED = re.compile(r'^(\S+) .* "GET /v2/\S+/blobs/(sha256:\S+) \S+" 20[06] (\d+) ')
BLOB = re.compile(r"/blobs/([0-9a-f]{64})\?")
FROM_HUB = ("match", "ip", "src", "10.77.0.1", "match", "ip", "sport", "8083", "0xffff")


def checkpoint_sums(guest: Guest, folder: str = "/srv/spark/sources/*--tiny-int4-*") -> str:
    return guest.run(f"cd {folder}; find . -type f ! -name receipt.json "
                     "-print0 | sort -z | xargs -0 sha256sum")  # fmt: skip


class HubLog:
    def __init__(self, repository: str = "tiny-int4"):
        self._start = ACCESS_LOG.stat().st_size
        self._sizes = {
            hashlib.sha256(path.read_bytes()).hexdigest(): path.stat().st_size
            for path in (STATE / "hub/lab" / repository).glob("*/*")
        }

    def ranges_to(self, guest: Guest) -> list[tuple[int, int]]:
        with ACCESS_LOG.open() as lines:
            lines.seek(self._start)
            requests = [json.loads(line) for line in lines]
        ranges = []
        for request in requests:
            blob = BLOB.match(request["path"])
            if blob and blob[1] in self._sizes and request["client"] == guest.ip:
                last = self._sizes[blob[1]] - 1
                words = (request["range"] or f"bytes=0-{last}")[6:].split("-")
                ranges.append((int(words[0]), min(int(words[1]), last)))
        return ranges

    def bytes_to(self, guest: Guest) -> int:
        return sum(last - first + 1 for first, last in self.ranges_to(guest))


class RegistryLog:
    def __init__(self) -> None:
        self._start = REGISTRY_LOG.stat().st_size

    def bytes_to(self, guest: Guest) -> dict[str, int]:
        with REGISTRY_LOG.open() as lines:
            lines.seek(self._start)
            pulls = [pull.groups() for line in lines if (pull := PULLED.match(line))]
        sent: dict[str, int] = {}
        for client, blob, size in pulls:
            if client == guest.ip:
                sent[blob] = sent.get(blob, 0) + int(size)
        return sent


@contextmanager
def limit_rate(link: str, rate: str, *matches: Sequence[str]) -> Iterator[None]:
    _tc(f"qdisc add dev {link} root handle 1: htb default 1")
    try:
        _tc(f"class add dev {link} parent 1: classid 1:1 htb rate 10gbit quantum 60000")
        _tc(f"class add dev {link} parent 1: classid 1:3 htb rate {rate}")
        for match in matches:
            words = f"filter add dev {link} parent 1: protocol ip u32 {' '.join(match)}"
            _tc(f"{words} flowid 1:3")
        yield
    finally:
        _tc(f"qdisc del dev {link} root")


def _tc(words: str) -> None:
    subprocess.run(["tc", *words.split()], check=True, timeout=20)
