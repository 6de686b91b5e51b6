"""Only members reach the ports of a cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from spark_contract.errors import HostToolError
from spark_contract.release import Release
from spark_host.system import cluster as fence
from stub_host import Paths
from test_members import HEAD, PORT, WORKER, clustered

# Records its arguments; fails for those in $HERE/refuses.
IPTABLES = """#!/bin/sh
echo "${0##*/} $*" >> $HERE/asked
[ -e $HERE/refuses ] || exit 0
case "$*" in *"$(cat $HERE/refuses)"*) echo "No chain by that name." >&2; exit 1;; esac
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("iptables", "ip6tables"):
        (tmp_path / name).write_text(IPTABLES.replace("$HERE", str(tmp_path)))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    release = clustered()
    monkeypatch.setattr(fence, "load_release", lambda name, paths: release)
    return tmp_path / "asked"


def told(asked: Path, program: str) -> list[str]:
    words = f"{program} -w 5 "
    lines = asked.read_text().splitlines() if asked.exists() else []
    return [line.removeprefix(words) for line in lines if line.startswith(words)]


def chain(release: Release) -> str:
    return f"SPARK-{release.name[-12:]}"


def test_only_members_and_loopback_are_accepted(asked: Path) -> None:
    fence.fence(["up", "any"], Paths(asked.parent))
    name = chain(clustered())
    jump = f"INPUT -p tcp --dport {PORT}:{PORT + 1} -j {name}"
    gone = [f"-D {jump}", f"-F {name}", f"-X {name}"]  # of an interrupted start
    assert told(asked, "iptables") == [
        *gone, f"-N {name}", f"-A {name} -i lo -j RETURN", f"-A {name} -s {HEAD} -j RETURN",
        f"-A {name} -s {WORKER} -j RETURN", f"-A {name} -j DROP", f"-I {jump}",
    ]  # fmt: skip
    # The store listens on IPv6, too, and no member uses it.
    assert told(asked, "ip6tables") == [
        *gone, f"-N {name}", f"-A {name} -i lo -j RETURN", f"-A {name} -j DROP", f"-I {jump}",
    ]  # fmt: skip
    assert len(name) < 29, "no kernel takes a longer one"


def test_down_removes_the_chain_and_ignores_absent_rules(asked: Path) -> None:
    (asked.parent / "refuses").write_text("-")
    fence.fence(["down", "any"], Paths(asked.parent))
    orders = [line.split()[0] for line in told(asked, "iptables")]
    assert orders == ["-D", "-F", "-X"]


def test_no_fence_without_cluster(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = dataclasses.replace(clustered(), cluster=None)
    monkeypatch.setattr(fence, "load_release", lambda name, paths: alone)
    fence.fence(["up", "any"], Paths(asked.parent))
    assert not asked.exists()


def test_iptables_failure_is_reported(asked: Path) -> None:
    (asked.parent / "refuses").write_text("-N")
    with pytest.raises(
        HostToolError, match=r"stay open to all hosts \(No chain by that name"
    ) as caught:
        fence.fence(["up", "any"], Paths(asked.parent))
    assert "firewall" in str(caught.value)
    with pytest.raises(HostToolError, match="up or down"):
        fence.fence(["sideways"], Paths(asked.parent))
