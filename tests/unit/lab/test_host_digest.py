"""Two hosts that hold the same have the same digest; anything that matters makes another."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.host_digest import lines
from tests.traces import difference

PROOF = {
    "release": "main-0123456789ab", "ok": True, "checked_at": "2026-11-22T14:49:13Z",
    "invocation_id": "ab12", "checks": [{"name": "copy", "ok": True, "seconds": 0.1}],
}  # fmt: skip


def made(root: Path, name: str = "lab-1") -> Path:
    def write(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    write("etc/hostname", name)
    write("etc/spark/api-key", name + "secret")
    write("etc/spark/releases/main-0123456789ab/release.json", "{}")
    write("var/lib/spark/proofs/main-0123456789ab.json", json.dumps(PROOF))
    write("var/lib/spark/events/main.jsonl", f"{time.time_ns()}")
    write("srv/spark/models/tree/receipt.json", '{"files": [{"path": "a", "inode": 7}]}')
    write("srv/spark/models/tree/a", "weights")
    (root / "etc/systemd/system").mkdir(parents=True)
    (root / "etc/systemd/system/spark-serve@x.service").symlink_to("/lib/spark")
    return root


def digest(root: Path, name: str = "lab-1") -> list[str]:
    return sorted(lines(root, (name,)))


def change(root: Path, path: str, **values: object) -> None:
    document = json.loads((root / path).read_text())
    (root / path).write_text(json.dumps(document | values))


def relink(root: Path) -> None:
    link = root / "etc/systemd/system/spark-serve@x.service"
    link.unlink()
    link.symlink_to("/lib/other")


def test_times_ids_secrets_and_a_hosts_own_name_make_no_difference(tmp_path: Path) -> None:
    one, other = made(tmp_path / "one", "lab-1"), made(tmp_path / "other", "lab-2")
    proof = "var/lib/spark/proofs/main-0123456789ab.json"
    checks = [{"name": "copy", "ok": True, "seconds": 9.9}]
    change(other, proof, checked_at="later", invocation_id="cd34", checks=checks)
    change(other, "srv/spark/models/tree/receipt.json", files=[{"path": "a", "inode": 8}])
    os.utime(other / "srv/spark/models/tree/a", (1, 1))
    assert difference(digest(one), digest(other, "lab-2")) == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file more": lambda root: (root / "var/lib/spark/switch").mkdir(),
    "a file gone": lambda root: (root / "srv/spark/models/tree/a").unlink(),
    "a record cut to zero": lambda root: (
        root / "var/lib/spark/proofs/main-0123456789ab.json"
    ).write_text(""),
    "a proof that failed": lambda root: change(
        root, "var/lib/spark/proofs/main-0123456789ab.json", ok=False
    ),
    "a check that failed": lambda root: change(
        root, "var/lib/spark/proofs/main-0123456789ab.json", checks=[{"name": "copy", "ok": False}]
    ),
    "other bytes": lambda root: (root / "srv/spark/models/tree/a").write_text("Weights"),
    "a mode": lambda root: (root / "etc/spark/api-key").chmod(0o640),
    "a link": relink,
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_matters_is_seen(tmp_path: Path, what: str) -> None:
    root = made(tmp_path)
    before = digest(root)
    CHANGES[what](root)
    assert difference(before, digest(root))
