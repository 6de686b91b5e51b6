"""Bytes cross the line to the hub once: hosts lend each other what they fetched.

Three guests of the lab; `SPARK_LENDING_GUESTS` names others. The hub's own log says what it sent,
and `tc` makes links slow, so that there is a middle to break something in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.faults.lending import FROM_HUB, Pulled, Sent, slow
from tests.labkit import Guest, Site, guest_named, lab

NAMES = os.environ.get("SPARK_LENDING_GUESTS", "lab-16 lab-17 lab-18").split()
SHARE = "spark-share@trees.service"
# 12.6 MB come in several seconds.
SLOW = "16mbit"


class Three:
    """Two hosts, and a third that comes later."""

    def __init__(self, site: Site):
        self.site = site
        self.guests = [guest_named(name) for name in NAMES]

    def only(self, *guests: Guest) -> None:
        self.site.hosts[:] = [guest.name for guest in guests]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    lab("up", *NAMES, "--fresh", "--engine", "stub")
    site = Site(tmp_path_factory.mktemp("site"), hosts=list(NAMES))
    site.choose(model="lab-stub", profile="base")
    yield Three(site)
    for name in NAMES:
        lab("down", name)


def tree(guest: Guest) -> str:
    """Return every file that was fetched, with its hash."""
    return guest.run("cd /srv/spark/sources/*--tiny-int4-*; find . -type f ! -name receipt.json "
                     "-print0 | sort -z | xargs -0 sha256sum")  # fmt: skip


def engine(guest: Guest) -> str:
    """Return what docker calls the engine's image: identity, layers, and every name."""
    return guest.run("docker image inspect -f '{{.Id}} {{.RootFS}} {{.RepoDigests}}' "
                     "$(docker images -q --no-trunc '*/lab/stub-engine')")  # fmt: skip


def blobs(guest: Guest) -> dict[str, int]:
    """Return the blobs of the engine's image that a host keeps for others."""
    lines = guest.run("cd /srv/spark/sources/image--*; stat -c '%n %s' sha256:*").splitlines()
    return {name: int(size) for name, size in map(str.split, lines)}


def closed(guest: Guest) -> bool:
    left = guest.run("ls /etc/spark/share.json /etc/spark/share-key 2>/dev/null || :")
    return left == "" and guest.unit(SHARE, "ActiveState")["ActiveState"] != "active"


def part(guest: Guest) -> int:
    """Return the size of the largest file that grows."""
    return int(guest.run("find /srv/spark/sources -name '*.part' -printf '%s\\n' 2>/dev/null "
                         "| sort -n | tail -1 | grep . || echo 0"))  # fmt: skip


def test_two_new_hosts_cost_one_copy(three: Three, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, _ = three.guests
    three.only(first, second)
    sent, pulled = Sent(), Pulled()

    with slow(f"veth-{first.name}", SLOW, FROM_HUB):
        run = three.site.deploy()

    assert run.exit_code == 0, run.stderr[-5000:]
    one_copy = sum(last - begin + 1 for begin, last in set(sent.to(first)))
    with capsys.disabled():
        print(f"\nhub sent {sent.bytes_to(first)} and {sent.bytes_to(second)} bytes")  # noqa: T201
    assert sent.bytes_to(first) == one_copy > 12_000_000
    assert sent.bytes_to(second) == 0
    image, layers = engine(first), blobs(first)
    assert {name: size for name, size in pulled.by(first).items() if name in layers} == layers
    assert not layers.keys() & pulled.by(second).keys()
    assert engine(second) == image
    assert "127.0.0.1" not in image
    assert tree(first) == tree(second)
    assert all(closed(guest) for guest in (first, second))
    three.site.deploy().must_have_changed_nothing()


def test_a_host_that_comes_later_takes_everything_from_those_there(three: Three) -> None:
    first, _, third = three.guests
    three.only(*three.guests)
    sent, pulled = Sent(), Pulled()

    run = three.site.deploy()

    assert run.exit_code == 0, run.stderr[-5000:]
    assert [sent.bytes_to(guest) for guest in three.guests] == [0, 0, 0]
    assert not blobs(first).keys() & pulled.by(third).keys()
    assert engine(third) == engine(first)
    assert tree(third) == tree(first)
    assert all(closed(guest) for guest in three.guests)
    three.site.deploy().must_have_changed_nothing()


def test_a_peer_that_dies_in_the_middle_of_a_file_costs_what_is_left(three: Three) -> None:
    first, _, third = three.guests
    three.only(first, third)
    third.run("rm -rf /srv/spark/sources/*")
    sent = Sent()

    lent = ("match", "ip", "src", first.ip, "match", "ip", "sport", "8010", "0xffff")
    with slow(f"veth-{third.name}", SLOW, lent):
        process = three.site.start()
        try:
            deadline = time.monotonic() + 200
            while part(third) < 300_000:
                assert time.monotonic() < deadline
            lab("break", "host-down", first.name)
            third.wait("ls /srv/spark/sources/*--tiny-int4-*/receipt.json", seconds=180)
        finally:
            lab("break", "host-down", first.name, "--heal")
            process.communicate(timeout=600)

    ranges = sent.to(third)
    assert any(begin > 0 for begin, _ in ranges)
    assert 0 < sent.bytes_to(third) < 12_000_000
    assert tree(third) == tree(first)
    again = three.site.deploy()
    assert again.exit_code == 0, again.stderr[-5000:]
    assert all(closed(guest) for guest in (first, third))


def test_a_built_tree_is_copied_and_not_built_again(three: Three) -> None:
    first, second, _ = three.guests
    three.only(first, second)
    three.site.choose(model="lab-stub", profile="v2")
    run = three.site.deploy("--limit", first.name)
    assert run.exit_code == 0, run.stderr[-5000:]
    sent = Sent("tiny-fp8")

    run = three.site.deploy()

    assert run.exit_code == 0, run.stderr[-5000:]
    assert sent.to(second) == []
    assert built(second) == built(first)
    job = second.run("journalctl -q -o cat -u 'spark-job@*' | grep 'copied from'")
    assert f"copied from http://{first.ip}:8010" in job
    linked = "find /srv/spark/models -name '*.safetensors' -links 1 -printf '%f\\n'"
    assert second.run(linked) == first.run(linked)
    three.site.deploy().must_have_changed_nothing()


def built(guest: Guest) -> str:
    """Return every file that was built, with its hash."""
    return guest.run("cd /srv/spark/models/lab-stub-*; find . -type f ! -name receipt.json "
                     "-print0 | sort -z | xargs -0 sha256sum")  # fmt: skip
