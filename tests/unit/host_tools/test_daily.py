import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from spark_contract import documents
from spark_contract.paths import RECEIPT_NAME
from spark_contract.receipts import ReceiptFile, SourceReceipt
from spark_contract.records import DailyReport, Proof
from spark_contract.tool import HostToolError
from spark_host import status
from spark_host.records import boot
from spark_host.system import host as system
from spark_host.system import programs
from spark_host.watch import daily
from spark_host.watch.daily import HASH_DAYS, hash_next
from stub_host import RELEASE, Host, write_certificate

from tests.receipts import source_receipt

UNITS = {
    f"spark-serve@{RELEASE}.service", f"spark-watch@{RELEASE}.service",
    "spark-gateway@main.service",
}  # fmt: skip


def days_ago(days):
    return (datetime.now(timezone.utc) - timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class ServingHost:
    host: Host
    units: set[str] = field(default_factory=lambda: set(UNITS))
    clock_synchronised: str = "yes"

    def inspect(self):
        system = replace(self.host.here, units=self)
        return [(problem.where, problem.what) for problem in daily.inspect_host(system).problems]

    def is_active(self, unit):
        return unit in self.units

    def write_proof(self, checked_at):
        result = Proof(RELEASE, "d", "run-1", "full", True, checked_at, (), {}, {}, False, ())
        boot.write_proof(result, self.host.here)

    @property
    def checkpoint(self):
        return self.host.paths.below("/srv/spark/models/x")

    @property
    def receipt(self):
        return self.checkpoint / "receipt.json"

    def write_certificate(self, days):
        self.host.gateway(tls=write_certificate(self.host.paths, days=days))

    def fill_journal(self):
        file = self.host.paths.below("/var/log/journal/abc/system.journal")
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(200_000))


@pytest.fixture
def serving(host, monkeypatch):
    serving = ServingHost(host)
    host.release()
    serving.checkpoint.mkdir(parents=True)
    serving.receipt.write_text(source_receipt(files=[{"path": "a", "size_bytes": 0}]))
    serving.write_proof(days_ago(1))
    host.gateway()
    monkeypatch.setattr(boot, "enabled_releases", lambda service, host: [RELEASE])
    run = programs.read_output

    def output_of(*argv):
        return serving.clock_synchronised if argv[0] == "timedatectl" else run(*argv)

    monkeypatch.setattr(programs, "read_output", output_of)
    for name, value in (("FREE_BYTES", 0), ("FREE_INODES_SHARE", 0), ("JOURNAL_BYTES", 100_000)):
        monkeypatch.setattr(daily, name, value)
    return serving


FAULTS: dict[str, tuple[Callable[[ServingHost], Any], str, str]] = {
    "watch": (lambda s: s.units.discard(f"spark-watch@{RELEASE}.service"), "watch", "not running"),
    "gateway": (lambda s: s.units.discard("spark-gateway@main.service"), "watch", "spark-gateway@"),
    "certificate": (lambda s: s.write_certificate(12), "certificate", "in 1"),
    "journal": (lambda s: s.fill_journal(), "journal", "uses 0.0 GiB"),
    "disk": (lambda s: setattr(daily, "FREE_BYTES", 1 << 60), "disk", "GiB is free"),
    "inodes": (lambda s: setattr(daily, "FREE_INODES_SHARE", 2), "disk", "inodes are free"),
    "clock": (lambda s: setattr(s, "clock_synchronised", "no"), "clock", "not synchronized"),
    "clock back": (lambda s: s.write_proof(days_ago(-2)), "clock", "went back"),
    "mount": (lambda s: shutil.rmtree(s.checkpoint), "mounts", "is missing"),
    "no receipt": (lambda s: s.receipt.unlink(), "checkpoint", "damaged or empty"),
    "cut receipt": (lambda s: os.truncate(s.receipt, 50), "checkpoint", "damaged or empty"),
    "receipt without files": (
        lambda s: s.receipt.write_text(source_receipt()), "checkpoint", "damaged or empty"
    ),
    "empty receipt": (lambda s: s.receipt.write_text(""), "checkpoint", "damaged or empty"),
    "old proof": (lambda s: s.write_proof(days_ago(90)), "proof", "passed a check 90 days ago"),
    "no proof": (lambda s: s.host.paths.proof(RELEASE).unlink(), "proof", "without a proof"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_daily_check_reports_each_problem(serving, fault):
    cause, where, message = FAULTS[fault]
    cause(serving)
    problems = serving.inspect()
    assert {place for place, _ in problems} == {where}
    assert message in problems[0][1]


@pytest.mark.parametrize("content", [b"", bytes(4096), b'{"schema_version": 1, "at'])
def test_daily_check_reports_each_damaged_document(serving, content):
    paths = serving.host.paths
    roots = (paths.below("/etc/spark"), paths.state)
    documents = [path for root in roots for path in root.rglob("*.json")]
    assert paths.release(RELEASE) in documents
    assert paths.proof(RELEASE) in documents
    for path in documents:
        before = path.read_bytes()
        path.write_bytes(content)
        messages = [message for where, message in serving.inspect() if where == "state"]
        assert [str(path) in message for message in messages] == [True]
        path.write_bytes(before)


def test_failing_inspection_does_not_hide_other_problems(serving):
    serving.clock_synchronised = "no"
    broken = serving.host.paths.state / "good/folder.json"
    broken.mkdir(parents=True)
    assert {where for where, _ in serving.inspect()} == {"clock", "daily check"}


def test_hanging_systemd_does_not_hide_other_problems(serving, monkeypatch):
    def hang(unit):
        raise HostToolError("systemctl show", "did not exit within 60 s", "run it again")

    serving.clock_synchronised = "no"
    monkeypatch.setattr(serving, "is_active", hang)
    assert {where for where, _ in serving.inspect()} == {"clock", "systemctl show"}


def test_healthy_host_has_no_problems(serving):
    serving.write_certificate(300)
    assert serving.inspect() == []


def test_status_includes_problems_found_by_the_daily_checks(serving):
    serving.clock_synchronised = "no"
    assert daily.main([], serving.host.paths) == 0
    [stored] = serving.host.here.disk.read(DailyReport, serving.host.paths.daily).problems
    assert stored.where == "clock"
    result = status.main([], serving.host.paths).daily
    assert result.problems == (stored,)


def test_daily_check_runs_on_a_host_without_releases(host):
    assert isinstance(daily.inspect_host(system.Host(host.paths)), DailyReport)


PIECE = 1000


def write_tree(tree):
    entries = []
    for name, size, with_pieces in (("a.bin", 25_500, True), ("b", 70, False), ("c/d", 900, False)):
        data = os.urandom(size)
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        cut = [data[start : start + PIECE] for start in range(0, size, PIECE)]
        pieces = tuple(f"{len(part)}:{hashlib.sha256(part).hexdigest()}" for part in cut)
        sha256 = None if with_pieces else hashlib.sha256(data).hexdigest()
        entries.append(ReceiptFile(name, size, sha256, pieces=pieces if with_pieces else None))
    receipt = SourceReceipt("source", "d" * 64, tuple(entries), "1", "", "lab/tiny", "c" * 40)
    (tree / RECEIPT_NAME).write_text(documents.to_json(receipt))
    return tree


def flip_byte(path, offset):
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "offset"), [("a.bin", 0), ("a.bin", 12_345), ("a.bin", 25_499), ("b", 69), ("c/d", 0)]
)
def test_detects_a_flipped_byte_within_14_days(tmp_path, name, offset):
    trees = [write_tree(tmp_path / tree) for tree in ("first", "second")]
    flip_byte(trees[1] / name, offset)
    position, damaged = 7, ()
    for _ in range(HASH_DAYS):
        problems, position = hash_next(trees, position, damaged)
        damaged = tuple(problems)
    [part] = damaged
    assert problems[part].what.startswith(str(trees[1] / name))
    flip_byte(trees[1] / name, offset)
    assert hash_next(trees, position, damaged)[0] == {}


def test_damage_is_reported_on_a_slow_disk(tmp_path, monkeypatch):
    tree = write_tree(tmp_path / "tree")
    flip_byte(tree / "a.bin", 0)
    problems, _ = hash_next([tree], 0)
    monkeypatch.setattr(daily, "_DAILY_LIMIT_S", -1)
    assert hash_next([tree], 9, tuple(problems)) == (problems, 9)


def test_healthy_checkpoints_are_read_once_every_14_days(tmp_path):
    trees, position, parts = [write_tree(tmp_path / "tree")], 0, 0
    for _ in range(HASH_DAYS):
        problems, following = hash_next(trees, position)
        assert problems == {}
        parts += (following - position) % 28
        position = following
    assert 28 <= parts <= 28 + HASH_DAYS // 2


def test_missing_checkpoint_file_is_reported_and_foreign_folders_are_ignored(tmp_path):
    tree = write_tree(tmp_path / "tree")
    assert hash_next([tmp_path / "none", tmp_path], 3) == ({}, 3)
    (tree / "a.bin").unlink()
    problems, _ = hash_next([tmp_path / "none", tree], 0)
    assert {problem.where for problem in problems.values()} == {"checkpoint"}
