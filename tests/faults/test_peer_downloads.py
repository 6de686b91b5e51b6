import os
import time

import pytest

from tests.faults.transfers import FROM_HUB, HubLog, RegistryLog, checkpoint_sums, limit_rate
from tests.labkit import Site, guest_named, lab

NAMES = os.environ.get("SPARK_PEER_GUESTS", "lab-16 lab-17 lab-18").split()
SHARE = "spark-share@trees.service"
SLOW = "16mbit"


class Three:
    def __init__(self, site):
        self.site = site
        self.guests = [guest_named(name) for name in NAMES]

    def limit_to(self, *guests):
        self.site.hosts[:] = [guest.name for guest in guests]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    lab("up", *NAMES, "--fresh", "--engine", "stub")
    site = Site(tmp_path_factory.mktemp("site"), hosts=list(NAMES))
    site.choose(model="lab-stub", profile="base")
    yield Three(site)
    lab("down", *NAMES)


def engine_image(guest):
    return guest.run("docker image inspect -f '{{.Id}} {{.RootFS}} {{.RepoDigests}}' "
                     "$(docker images -q --no-trunc '*/lab/stub-engine')")  # fmt: skip


def shared_blobs(guest):
    lines = guest.run("cd /srv/spark/sources/image--*; stat -c '%n %s' sha256:*").splitlines()
    return {name: int(size) for name, size in map(str.split, lines)}


def stopped_sharing(guest):
    left = guest.run("ls /etc/spark/share.json /etc/spark/share-key 2>/dev/null || :")
    return left == "" and guest.unit(SHARE, "ActiveState")["ActiveState"] != "active"


def largest_part(guest):
    return int(guest.run("find /srv/spark/sources -name '*.part' -printf '%s\\n' 2>/dev/null "
                         "| sort -n | tail -1 | grep . || echo 0"))  # fmt: skip


def test_two_new_hosts_download_one_copy_from_the_hub(three):
    first, second, _ = three.guests
    three.limit_to(first, second)
    hub, registry = HubLog(), RegistryLog()

    with limit_rate(f"veth-{first.name}", SLOW, FROM_HUB):
        three.site.deploy().assert_succeeded()

    one_copy = sum(last - begin + 1 for begin, last in set(hub.ranges_to(first)))
    assert hub.bytes_to(first) == one_copy > 12_000_000
    assert hub.bytes_to(second) == 0
    image, blobs = engine_image(first), shared_blobs(first)
    pulled = registry.bytes_to(first)
    assert {name: size for name, size in pulled.items() if name in blobs} == blobs
    assert not blobs.keys() & registry.bytes_to(second).keys()
    assert engine_image(second) == image
    assert "127.0.0.1" not in image
    assert checkpoint_sums(first) == checkpoint_sums(second)
    assert all(stopped_sharing(guest) for guest in (first, second))
    three.site.deploy().assert_unchanged()


def test_later_host_downloads_everything_from_peers(three):
    first, _, third = three.guests
    three.limit_to(*three.guests)
    hub, registry = HubLog(), RegistryLog()

    three.site.deploy().assert_succeeded()
    assert [hub.bytes_to(guest) for guest in three.guests] == [0, 0, 0]
    assert not shared_blobs(first).keys() & registry.bytes_to(third).keys()
    assert engine_image(third) == engine_image(first)
    assert checkpoint_sums(third) == checkpoint_sums(first)
    assert all(stopped_sharing(guest) for guest in three.guests)
    three.site.deploy().assert_unchanged()


def test_host_downloads_only_missing_bytes_if_its_peer_dies(three):
    first, _, third = three.guests
    three.limit_to(first, third)
    third.run("rm -rf /srv/spark/sources/*")
    hub = HubLog()

    from_peer = ("match", "ip", "src", first.ip, "match", "ip", "sport", "8010", "0xffff")
    with limit_rate(f"veth-{third.name}", SLOW, from_peer):
        process = three.site.start()
        try:
            deadline = time.monotonic() + 200
            while largest_part(third) < 300_000:
                assert time.monotonic() < deadline
            lab("break", "host-down", first.name)
            third.wait("ls /srv/spark/sources/*--tiny-int4-*/receipt.json", seconds=180)
        finally:
            lab("break", "host-down", first.name, "--heal")
            process.communicate(timeout=600)

    assert any(begin > 0 for begin, _ in hub.ranges_to(third))
    assert 0 < hub.bytes_to(third) < 12_000_000
    assert checkpoint_sums(third) == checkpoint_sums(first)
    three.site.deploy().assert_succeeded()
    assert all(stopped_sharing(guest) for guest in (first, third))


def test_new_host_copies_built_checkpoint_instead_of_rebuilding_it(three):
    first, second, _ = three.guests
    three.limit_to(first, second)
    three.site.choose(model="lab-stub", profile="v2")
    three.site.deploy("--limit", first.name).assert_succeeded()
    hub = HubLog("tiny-fp8")

    three.site.deploy().assert_succeeded()
    assert hub.ranges_to(second) == []
    built = "/srv/spark/models/lab-stub-*"
    assert checkpoint_sums(second, built) == checkpoint_sums(first, built)
    second.run(f"journalctl -q -o cat -u 'spark-job@*' | grep 'copied from http://{first.ip}:8010'")
    linked = "find /srv/spark/models -name '*.safetensors' -links 1 -printf '%f\\n'"
    assert second.run(linked) == first.run(linked)
    three.site.deploy().assert_unchanged()
