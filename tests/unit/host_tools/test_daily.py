"""The daily inspection reports each problem."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from spark_contract.records import DailyLook
from spark_host import status
from spark_host.records import boot, proof
from spark_host.system import host as system
from spark_host.system import programs
from spark_host.watch import daily
from stub_host import RELEASE, Host, release_data

UNITS = {f"spark-serve@{RELEASE}.service", f"spark-watch@{RELEASE}.service"}
UNITS |= {"spark-gateway@main.service"}


def ago(days: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Serving:
    host: Host
    units: set[str] = field(default_factory=lambda: set(UNITS))
    clock: str = "yes"

    def problems(self) -> list[tuple[str, str]]:
        host = replace(self.host.here, units=self)  # type: ignore[arg-type]
        return [(problem.where, problem.what) for problem in daily.inspect(host).problems]

    def is_active(self, unit: str) -> bool:
        return unit in self.units

    def write_proof(self, at: str) -> None:
        proof.write(
            proof.Proof(
                release=RELEASE, digest="d", invocation_id="run-1", level="full", ok=True,
                checked_at=at, checks=(), versions={}, engine={}, portable=False, stubbed=(),
            ),
            self.host.here,
        )  # fmt: skip

    @property
    def tree(self) -> Path:
        return self.host.paths.below("/srv/spark/models/x")


@pytest.fixture
def serving(host: Host, monkeypatch: pytest.MonkeyPatch) -> Serving:
    made = Serving(host)
    host.release()
    made.tree.mkdir(parents=True)
    made.write_proof(ago(1))
    host.gateway()
    monkeypatch.setattr(boot, "enabled", lambda service, host: [RELEASE])
    run = programs.output_of

    def output_of(*argv: str) -> str | None:
        return made.clock if argv[0] == "timedatectl" else run(*argv)

    monkeypatch.setattr(programs, "output_of", output_of)
    monkeypatch.setattr(daily, "FREE_BYTES", 0)
    monkeypatch.setattr(daily, "FREE_INODES_SHARE", 0)
    return made


def write_certificate(path: Path, days: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", os.devnull, "-out", str(path), "-days", str(days), "-subj", "/CN=x"],
        check=True, capture_output=True,
    )  # fmt: skip


def set_certificate(serving: Serving, days: int) -> None:
    files = {"certificate": "/etc/spark/cert.pem", "key": "/etc/spark/key.pem"}
    serving.host.gateway(tls=files)
    write_certificate(serving.host.paths.below(files["certificate"]), days)


def fill_journal(serving: Serving) -> None:
    file = serving.host.paths.below("/var/log/journal/abc/system.journal")
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(200_000))
    daily.JOURNAL_BYTES = 100_000


def fill_cache(serving: Serving, files: int, size: int) -> None:
    cache = serving.host.paths.below(f"/srv/spark/cache/x/{RELEASE}")
    (cache / "deep").mkdir(parents=True)
    (cache / "deep/link").symlink_to("/")  # never followed
    for number in range(files):
        (cache / f"deep/{number}").write_bytes(bytes(size))
    mount = {"source": "/srv/spark/cache/x", "target": "/cache", "read_only": False}
    engine = {**release_data()["engine"], "mounts": [mount]}
    serving.host.release(engine=engine)
    daily.CACHE_BYTES, daily.CACHE_FILES = 100_000, 50


FAULTS: dict[str, tuple[Callable[[Serving], Any], str, str]] = {
    "watch": (lambda s: s.units.discard(f"spark-watch@{RELEASE}.service"), "watch", "does not run"),
    "gateway": (lambda s: s.units.discard("spark-gateway@main.service"), "watch", "spark-gateway@"),
    "certificate": (lambda s: set_certificate(s, 12), "certificate", "in 1"),
    "journal": (fill_journal, "journal", "takes 0.0 GiB"),
    "disk": (lambda s: setattr(daily, "FREE_BYTES", 1 << 60), "disk", "GiB are free"),
    "inodes": (lambda s: setattr(daily, "FREE_INODES_SHARE", 2), "disk", "inodes are free"),
    "cache": (
        lambda s: fill_cache(s, 10, 20_000),
        "cache",
        f"/srv/spark/cache/x/{RELEASE} has 0.0 GiB",
    ),
    "cache of files": (lambda s: fill_cache(s, 80, 0), "cache", "in 51 files"),
    "clock": (lambda s: setattr(s, "clock", "no"), "clock", "not synchronised"),
    "clock back": (lambda s: s.write_proof(ago(-2)), "clock", "went back"),
    "mount": (lambda s: s.tree.rmdir(), "mounts", "is missing"),
    "old proof": (lambda s: s.write_proof(ago(90)), "proof", "was proven 90 days ago"),
    "no proof": (lambda s: s.host.paths.proof(RELEASE).unlink(), "proof", "without a proof"),
}


def test_healthy_host_has_no_problems(serving: Serving) -> None:
    set_certificate(serving, 300)
    assert serving.problems() == []


@pytest.fixture(autouse=True)
def restore_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOURNAL_BYTES", "CACHE_BYTES", "CACHE_FILES"):
        monkeypatch.setattr(daily, name, getattr(daily, name))


def test_cache_of_usual_size_is_no_problem(serving: Serving) -> None:
    fill_cache(serving, 10, 100)
    assert serving.problems() == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_problem_is_reported(serving: Serving, fault: str) -> None:
    cause, where, message = FAULTS[fault]
    cause(serving)
    problems = serving.problems()
    assert {part for part, _ in problems} == {where}
    assert message in problems[0][1]


def test_status_includes_daily_problems(serving: Serving) -> None:
    serving.clock = "no"
    assert daily.main([], serving.host.paths) == 0
    [kept] = serving.host.here.disk.read(DailyLook, serving.host.paths.daily).problems
    assert kept.where == "clock"
    reported = status.main([], serving.host.paths).daily
    assert reported is not None
    assert reported.problems == (kept,)


def test_inspects_a_host_without_releases(host: Host) -> None:
    assert isinstance(daily.inspect(system.Host(host.paths)), DailyLook)
