import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.host_digest import lines
from tests.traces import difference

PROOF = "var/lib/spark/proofs/main-0123456789ab.json"


def make_root(root, name="lab-1"):
    proof = {
        "release": "main-0123456789ab", "ok": True, "checked_at": "2026-11-22T14:49:13Z",
        "invocation_id": "ab12", "checks": [{"name": "copy", "ok": True, "seconds": 0.1}],
    }  # fmt: skip
    files = {
        "etc/hostname": name, "etc/spark/api-key": name + "secret", PROOF: json.dumps(proof),
        "var/lib/spark/events/main.jsonl": name, "srv/spark/models/tree/a": "weights",
        "srv/spark/models/tree/receipt.json": '{"files": [{"path": "a", "inode": 7}]}',
    }  # fmt: skip
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "etc/spark/link").symlink_to("/lib/spark")
    return root


def digest(root, name="lab-1"):
    return sorted(lines(root, (name,)))


def change(root, path, **values):
    document = json.loads((root / path).read_text())
    (root / path).write_text(json.dumps(document | values))


def replace_link(root):
    (root / "etc/spark/link").unlink()
    (root / "etc/spark/link").symlink_to("/lib/other")


def test_host_digest_ignores_times_ids_secrets_and_host_names(tmp_path):
    first, second = make_root(tmp_path / "1", "lab-1"), make_root(tmp_path / "2", "lab-2")
    checks = [{"name": "copy", "ok": True, "seconds": 9.9}]
    change(second, PROOF, checked_at="later", invocation_id="cd34", checks=checks)
    change(second, "srv/spark/models/tree/receipt.json", files=[{"path": "a", "inode": 8}])
    os.utime(second / "srv/spark/models/tree/a", (1, 1))
    assert difference(digest(first), digest(second, "lab-2")) == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "added folder": lambda root: (root / "var/lib/spark/switch").mkdir(),
    "missing file": lambda root: (root / "srv/spark/models/tree/a").unlink(),
    "empty record": lambda root: (root / PROOF).write_text(""),
    "failed proof": lambda root: change(root, PROOF, ok=False),
    "failed check": lambda root: change(root, PROOF, checks=[{"name": "copy", "ok": False}]),
    "content": lambda root: (root / "srv/spark/models/tree/a").write_text("Weights"),
    "mode": lambda root: (root / "etc/spark/api-key").chmod(0o640),
    "link": replace_link,
}


@pytest.mark.parametrize("name", CHANGES)
def test_host_digest_shows_every_kind_of_difference(tmp_path, name):
    root = make_root(tmp_path)
    before = digest(root)
    CHANGES[name](root)
    assert difference(before, digest(root))
