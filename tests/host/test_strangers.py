"""What strangers find on a host that serves, told by its own tools and without knowing our code.

A stranger is another account of the host, the program in somebody else's container, the engine's
own account, and whoever is on the network. Each looks for what it can read, write or reach.
"""

from __future__ import annotations

import shlex
import socket

import pytest

from tests.host.exposure import Place

MALLORY = "setpriv --reuid mallory --regid mallory --clear-groups"
ENGINE = "setpriv --reuid spark-engine --regid spark-engine --clear-groups"
OURS = (
    "/etc/spark /srv/spark /var/lib/spark /var/cache/spark* /run/spark* /usr/local/lib/spark "
    "/etc/systemd/system /etc/sudoers.d /etc/docker /etc/apt /etc/sysusers.d /etc/cdi"
)
PLACES = "/etc /run /srv /var /usr/local /home /root /tmp"
ASK = r"""
cat /proc/sys/kernel/random/uuid > /root/word
sed 's/.*/header = "Authorization: Bearer &"/' /etc/spark/api-key | curl -K - -sS -m 60 \
  -H 'Content-Type: application/json' http://127.0.0.1:8000/v1/chat/completions \
  -d "{\"model\": \"lab-model\", \"max_tokens\": 200, \"messages\": [{\"role\": \"user\",
    \"content\": \"Repeat exactly: $(cat /root/word)\"}]}"
"""


# Every port of the host, at both of its addresses.
SCAN = """
import socket
for host in ("172.17.0.1", "{}"):
    for port in range(1, 65536):
        with socket.socket() as knock:
            knock.settimeout(2)
            if knock.connect_ex((host, port)) == 0:
                print(host, port)
"""


@pytest.fixture(scope="module", autouse=True)
def mallory(place: Place) -> None:
    place.guest.run("id mallory 2>/dev/null || useradd --create-home mallory")


def as_(who: str, place: Place, command: str) -> str:
    """Run a command as somebody in a place of his own, and return what it printed."""
    words = shlex.quote(f"cd /tmp; {command}")
    return place.guest.run(f"{who} sh -c {words} 2>/dev/null", check=False, timeout_s=300)


@pytest.mark.parametrize("who", [MALLORY, ENGINE], ids=["account", "engine"])
def test_another_account_can_write_to_nothing_of_ours(place: Place, who: str) -> None:
    found = as_(who, place, f"find {OURS} -not -type l -writable").splitlines()
    own = ("/run/spark/engines/main", "/srv/spark/cache/") if who == ENGINE else ()
    assert [path for path in found if not path.startswith(own)] == []
    above = as_(who, place, "for p in /etc /srv /var/lib /var/cache /run /usr/local/lib; do "
                            "test -w $p && echo $p; done")  # fmt: skip
    assert above == ""


def test_another_account_reads_no_secret(place: Place) -> None:
    key = place.guest.key()
    assert as_(MALLORY, place, "cat /etc/spark/api-key") == ""
    as_(MALLORY, place, f"find {PLACES} -type f -readable -print0 > /tmp/readable; :")
    assert int(place.guest.run("tr -cd '\\0' < /tmp/readable | wc -c")) > 1000
    look = "xargs -0 -a /tmp/readable grep -lsF -f /etc/spark/api-key"
    assert place.guest.run(look, check=False, timeout_s=300) == ""
    # Nor for anybody in what programs were called with, in units, containers, or the journal.
    for shown in (
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'",
        "systemctl show 'spark-*' docker.service",
        "journalctl --no-pager",
        "docker inspect $(docker ps -aq)",
    ):
        said = place.guest.run(shown, check=False, timeout_s=300)
        assert len(said) > 1000
        assert key not in said


def test_another_account_orders_nobody_about(place: Place) -> None:
    assert as_(MALLORY, place, "docker ps && echo yes") == ""
    assert as_(MALLORY, place, "sudo -n true && echo yes") == ""
    unit = place.guest.serving()[0]
    for order in ("stop", "restart", "kill", "disable", "mask"):
        assert as_(MALLORY, place, f"systemctl --no-ask-password {order} {unit} && echo yes") == ""
    assert place.guest.serving() == [unit]
    sockets = as_(MALLORY, place, "find /run /var /srv -type s -writable").splitlines()
    assert [path for path in sockets if "spark" in path or "docker" in path] == []
    assert as_(MALLORY, place, "cat /run/spark/*.env /var/lib/spark/answers/*") == ""


def test_what_people_ask_is_kept_nowhere(place: Place) -> None:
    # The word is drawn on the host: in a command of this test it would stand in sudo's own log.
    said = place.guest.run(ASK)
    word = place.guest.run("cat /root/word")
    assert said.count(word) == 1
    place.guest.run("journalctl --flush --sync; sync", check=False)
    found = place.guest.run(
        f"journalctl --no-pager | grep -F -f /root/word; "
        f"grep -rlsaF -f /root/word {PLACES} --exclude=word",
        check=False, timeout_s=300,
    )  # fmt: skip
    assert found == ""


def test_a_neighbour_s_container_reaches_nothing_but_the_login(place: Place) -> None:
    # What docker does for a container at its bridge.
    place.guest.run(
        "ip netns add neighbour; ip link add nb0 type veth peer name nb1; "
        "ip link set nb0 master docker0 up; ip link set nb1 netns neighbour; "
        "ip -n neighbour addr add 172.17.200.2/16 dev nb1; ip -n neighbour link set nb1 up; "
        "ip -n neighbour route add default via 172.17.0.1"
    )
    program = shlex.quote(SCAN.format(place.guest.ip))
    try:
        out = place.guest.run(f"ip netns exec neighbour python3 -c {program}", timeout_s=600)
    finally:
        place.guest.run("ip link del nb0; ip netns del neighbour")
    assert set(out.splitlines()) == {"172.17.0.1 22", f"{place.guest.ip} 22"}


def test_from_the_network_only_the_login_is_there(place: Place) -> None:
    found = []
    for port in range(1, 65536):
        with socket.socket() as knock:
            knock.settimeout(2)
            if knock.connect_ex((place.guest.ip, port)) == 0:
                found.append(port)
    assert found == [22]
