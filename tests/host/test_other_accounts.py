import shlex
import socket

import pytest

MALLORY = "setpriv --reuid mallory --regid mallory --clear-groups"
ENGINE = "setpriv --reuid spark-engine --regid spark-engine --clear-groups"
MANAGED = (
    "/etc/spark /srv/spark /var/lib/spark /var/cache/spark* /run/spark* /usr/local/lib/spark "
    "/etc/systemd/system /etc/sudoers.d /etc/docker /etc/apt /etc/sysusers.d /etc/cdi"
)
PLACES = "/etc /run /srv /var /usr/local /home /root /tmp"
SEND_SECRET_WORD = r"""
cat /proc/sys/kernel/random/uuid > /root/word
sed 's/.*/header = "Authorization: Bearer &"/' /etc/spark/api-key | curl -K - -sS -m 60 \
  -H 'Content-Type: application/json' http://127.0.0.1:8000/v1/chat/completions \
  -d "{\"model\": \"lab-model\", \"max_tokens\": 200, \"messages\": [{\"role\": \"user\",
    \"content\": \"Repeat exactly: $(cat /root/word)\"}]}"
"""


# Every port of the host, at both addresses.
SCAN = """
import socket
for host in ("172.17.0.1", "{}"):
    for port in range(1, 65536):
        with socket.socket() as probe:
            probe.settimeout(2)
            if probe.connect_ex((host, port)) == 0:
                print(host, port)
"""


@pytest.fixture(scope="module", autouse=True)
def mallory(gateway):
    gateway.guest.run("id mallory 2>/dev/null || useradd --create-home mallory")


def run_as(account, gateway, command):
    words = shlex.quote(f"cd /tmp; {command}")
    return gateway.guest.run(f"{account} sh -c {words} 2>/dev/null", check=False, timeout_s=300)


@pytest.mark.parametrize("account", [MALLORY, ENGINE], ids=["account", "engine"])
def test_other_account_cannot_write_managed_files(gateway, account):
    paths = run_as(account, gateway, f"find {MANAGED} -not -type l -writable").splitlines()
    own = ("/run/spark/engines/main", "/srv/spark/cache/") if account == ENGINE else ()
    assert [path for path in paths if not path.startswith(own)] == []
    for parent in ["/etc", "/srv", "/var/lib", "/var/cache", "/run", "/usr/local/lib"]:
        assert run_as(account, gateway, f"test -w {parent} && echo writable") == ""


def test_other_account_cannot_read_secrets(gateway):
    key = gateway.guest.key()
    assert run_as(MALLORY, gateway, "cat /etc/spark/api-key") == ""
    run_as(MALLORY, gateway, f"find {PLACES} -type f -readable -print0 > /tmp/readable; :")
    assert int(gateway.guest.run("tr -cd '\\0' < /tmp/readable | wc -c")) > 1000
    look = "xargs -0 -a /tmp/readable grep -lsF -f /etc/spark/api-key"
    assert gateway.guest.run(look, check=False, timeout_s=300) == ""
    for shown in (
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'",
        "systemctl show 'spark-*' docker.service",
        "journalctl --no-pager",
        "docker inspect $(docker ps -aq)",
    ):
        output = gateway.guest.run(shown, check=False, timeout_s=300)
        assert len(output) > 1000
        assert key not in output


def test_other_account_cannot_control_units_or_containers(gateway):
    assert run_as(MALLORY, gateway, "docker ps && echo yes") == ""
    assert run_as(MALLORY, gateway, "sudo -n true && echo yes") == ""
    unit = gateway.guest.serving()[0]
    for verb in ("stop", "restart", "kill", "disable", "mask"):
        assert (
            run_as(MALLORY, gateway, f"systemctl --no-ask-password {verb} {unit} && echo yes") == ""
        )
    assert gateway.guest.serving() == [unit]
    sockets = run_as(MALLORY, gateway, "find /run /var /srv -type s -writable").splitlines()
    assert [path for path in sockets if "spark" in path or "docker" in path] == []
    assert run_as(MALLORY, gateway, "cat /run/spark/*.env /var/lib/spark/answers/*") == ""


def test_prompts_are_not_stored_on_the_host(gateway):
    output = gateway.guest.run(SEND_SECRET_WORD)
    word = gateway.guest.run("cat /root/word")
    assert output.count(word) == 1
    gateway.guest.run("journalctl --flush --sync; sync", check=False)
    paths = gateway.guest.run(
        f"journalctl --no-pager | grep -F -f /root/word; "
        f"grep -rlsaF -f /root/word {PLACES} --exclude=word",
        check=False, timeout_s=300,
    )  # fmt: skip
    assert paths == ""


def test_unmanaged_container_can_connect_only_to_ssh_on_the_host(gateway):
    gateway.guest.run(
        "ip netns add neighbour; ip link add nb0 type veth peer name nb1; "
        "ip link set nb0 master docker0 up; ip link set nb1 netns neighbour; "
        "ip -n neighbour addr add 172.17.200.2/16 dev nb1; ip -n neighbour link set nb1 up; "
        "ip -n neighbour route add default via 172.17.0.1"
    )
    program = shlex.quote(SCAN.format(gateway.guest.ip))
    try:
        out = gateway.guest.run(f"ip netns exec neighbour python3 -c {program}", timeout_s=600)
    finally:
        gateway.guest.run("ip link del nb0; ip netns del neighbour")
    assert set(out.splitlines()) == {"172.17.0.1 22", f"{gateway.guest.ip} 22"}


def test_network_clients_can_connect_only_to_ssh_on_the_host(gateway):
    paths = []
    for port in range(1, 65536):
        with socket.socket() as probe:
            probe.settimeout(2)
            if probe.connect_ex((gateway.guest.ip, port)) == 0:
                paths.append(port)
    assert paths == [22]
