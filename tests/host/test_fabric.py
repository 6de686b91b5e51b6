import json
import os
import re
import time

import pytest
from spark_contract.documents import to_json
from spark_contract.status import FabricPlan, FabricPort

from spark_deploy.plan.cluster import render_netplan
from tests.labkit import Site, guest_named, lab

NAMES = os.environ.get("SPARK_FABRIC_GUESTS", "lab-39 lab-40").split()
FILE = "/etc/netplan/40-spark-fabric.yaml"
TRIAL = "/run/netplan/40-spark-fabric.yaml"
FABRIC = "deploys/fabric.py"
MTU = 9000
PORTS = ("fab0", "fab1")
INSTALL = "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y netplan.io"
# The netplan of an installed system; the lab configured the guest from outside, without udev.
MANAGEMENT = """
cat > /etc/netplan/01-management.yaml <<END
network:
  version: 2
  ethernets:
    eth0:
      addresses: [$(ip -4 -o addr show eth0 | awk '{print $4}'), "fd00:7::5/64"]
      routes: [{to: default, via: $(ip route show default | awk '{print $3}')}]
END
chmod 600 /etc/netplan/01-management.yaml
printf '#!/bin/sh\\nexit 0\n' > /usr/local/bin/udevadm
chmod 755 /usr/local/bin/udevadm
# networkd cannot configure an interface with foreign addresses, so flush them first.
systemd-run --quiet --wait --collect sh -c 'ip address flush dev eth0; netplan apply'
"""
SERVICES = {"networkd": "systemd-networkd", "NetworkManager": "NetworkManager"}
# NetworkManager restores an address that was flushed.
LOSE = {"networkd": "ip address flush dev eth0", "NetworkManager": "nmcli device disconnect eth0"}
# A foreign file that configures a port: path, command to create it, command to remove it.
FOREIGN = {
    "networkd": (
        "/etc/netplan/60-owner.yaml",
        "echo 'network: {ethernets: {fab0: {optional: true}}}' > /etc/netplan/60-owner.yaml",
        "rm /etc/netplan/60-owner.yaml",
    ),
    "NetworkManager": (
        "/etc/NetworkManager/system-connections/owner.nmconnection",
        "nmcli connection add type ethernet ifname fab0 con-name owner "
        "ipv4.method disabled ipv6.method disabled",
        "nmcli connection delete owner",
    ),
}
CUT = "/run/network-was-cut"
MANAGEMENT_STATE = "ip route show default; ip -br addr show eth0 scope global"
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module", params=["networkd", "NetworkManager"])
def renderer(request):
    return str(request.param)


@pytest.fixture(scope="module")
def site(renderer, tmp_path_factory):
    variant = ["--variant", "network-manager"] if renderer == "NetworkManager" else []
    lab("up", *NAMES, "--fresh", *variant)
    new_site = Site(tmp_path_factory.mktemp("site"), hosts=list(NAMES))
    new_site.choose(fabric={"hosts": list(NAMES), "interfaces": list(PORTS), "mtu": MTU})
    for guest in map(guest_named, NAMES):
        if not variant:
            guest.run(INSTALL, timeout_s=300)
            guest.run(MANAGEMENT)
        assert guest.run(f"systemctl is-active {SERVICES[renderer]}") == "active"
    lay_cables()
    yield new_site
    lab("down", "--delete", *NAMES)


def lay_cables():
    lab("cable", *NAMES, *PORTS)


def addresses(guest):
    links = json.loads(guest.run("ip -j address show"))
    return {
        link["ifname"]: (
            [f"{entry['local']}/{entry['prefixlen']}" for entry in link["addr_info"]
             if entry["family"] == "inet"],
            link["mtu"],
        )
        for link in links
        if link["ifname"] in PORTS
    }  # fmt: skip


def netplan_files(guest):
    return guest.run(f"ls {FILE} {TRIAL} 2>/dev/null || :").split()


def assert_bare(guest):
    assert addresses(guest) == {"fab0": ([], 1500), "fab1": ([], 1500)}
    assert netplan_files(guest) == []


def test_fabric_dry_run_shows_netplan_file_and_changes_nothing(site):
    run = site.deploy(deploy=FABRIC, dry=True).assert_succeeded()
    assert "192.168.100.11/24" in run.stderr
    for guest in map(guest_named, NAMES):
        assert_bare(guest)


def test_fabric_deploy_rejects_port_configured_by_another_netplan_file(site, renderer):
    file, write, remove = FOREIGN[renderer]
    guest = guest_named(NAMES[0])
    guest.run(write)
    run = site.deploy("--limit", guest.name, deploy=FABRIC)
    guest.run(remove)
    assert run.exit_code != 0
    assert file in run.stderr
    assert_bare(guest)


def test_fabric_deploy_configures_all_ports_and_second_run_changes_nothing(site):
    guests = [guest_named(name) for name in NAMES]
    before = [guest.run(MANAGEMENT_STATE) for guest in guests]
    site.deploy(deploy=FABRIC).assert_succeeded()
    for number, guest in enumerate(guests):
        assert addresses(guest) == {
            "fab0": ([f"192.168.100.{11 + number}/24"], MTU),
            "fab1": ([f"192.168.101.{11 + number}/24"], MTU),
        }
        assert guest.run(f"stat -c '%a %U' {FILE}").strip() == "600 root"
        assert netplan_files(guest) == [FILE]
        assert guest.run("systemctl list-units --plain --no-legend 'spark-fabric*'") == ""
    for network in (100, 101):
        guests[0].run(f"ping -q -n -M do -c 2 -W 2 -s {MTU - 28} 192.168.{network}.12")
    assert [guest.run(MANAGEMENT_STATE) for guest in guests] == before
    site.deploy(deploy=FABRIC).assert_unchanged()


def sent_bytes(guest, port):
    return int(guest.run(f"cat /sys/class/net/{port}/statistics/tx_bytes"))


MEASURE = ("--data", "fabric.measure=true")


def test_speed_test_measures_each_cable_in_both_directions_and_cleans_up(site):
    guests = [guest_named(name) for name in NAMES]
    before = {(guest.name, port): sent_bytes(guest, port) for guest in guests for port in PORTS}
    run = site.deploy(*MEASURE, deploy=FABRIC).assert_unchanged()
    figures = re.findall(
        r"\[(\S+)\]\s+(fab\d) to (\S+) \([0-9.]+\): ([0-9.]+) Gb/s over TCP "
        r"\((\d+) MB in ([0-9.]+) s; link",
        run.stderr,
    )
    first, second = NAMES
    expected = [(host, port, peer) for host, peer in ((first, second), (second, first))
                for port in PORTS]  # fmt: skip
    assert sorted((host, port, peer) for host, port, peer, *_ in figures) == expected
    for _, _, _, gbit_per_s, sent_mb, took_s in figures:
        assert float(gbit_per_s) > 0
        assert int(sent_mb) <= 1000
        assert float(took_s) < 2.7
    for guest in guests:
        for port in PORTS:  # with headers and acknowledgements
            assert sent_bytes(guest, port) - before[guest.name, port] < 1.2e9
        units = guest.run("systemctl list-units --plain --no-legend 'run-*'")
        assert "fabric" not in units
        assert guest.run("ss -tlnH 'sport >= 20000 and sport < 29000'") == ""


def test_speed_test_reports_slow_cable(site):
    guest = guest_named(NAMES[0])
    guest.run("tc qdisc add dev fab1 root tbf rate 50mbit burst 64kb latency 50ms")
    began = time.monotonic()
    run = site.deploy(*MEASURE, deploy=FABRIC)
    took_s = time.monotonic() - began
    guest.run("tc qdisc del dev fab1 root")
    assert run.exit_code != 0
    assert re.search(rf"{NAMES[0]}: fab1: 0\.0 Gb/s to {NAMES[1]} over a ", run.stderr)
    assert took_s < 120


def test_fabric_addresses_survive_reboot(site):
    guest = guest_named(NAMES[0])
    guest.reboot()
    lay_cables()
    guest.wait("ip -4 -o addr show fab0 | grep -q 192.168.100.11/24", seconds=30)
    guest.wait(f"ip link show fab1 | grep -q 'mtu {MTU}'", seconds=30)


def test_fabric_restore_removes_the_addresses(site):
    site.deploy("--data", "fabric.restore=true", deploy=FABRIC).assert_succeeded()
    for guest in map(guest_named, NAMES):
        assert_bare(guest)
    site.deploy("--data", "fabric.restore=true", deploy=FABRIC).assert_unchanged()


def start_trial(guest, confirm_s):
    port = FabricPort("fab0", "192.168.100.77/24", MTU)
    plan = to_json(FabricPlan(render_netplan([port]), (port,), confirm_s))
    guest.run(f"cat > /tmp/plan <<'END'\n{plan}\nEND")
    guest.run("/usr/local/lib/spark/current/bin/spark-host fabric try < /tmp/plan")
    guest.wait("ip -4 -o addr show fab0 | grep -q 192.168.100.77", seconds=60)


def wait_for_restore(guest, seconds=120):
    restoring = "systemctl is-active -q spark-fabric-return.service"
    guest.wait(f"! test -e {TRIAL} && ! {restoring}", seconds=seconds)


def test_unconfirmed_network_trial_is_reverted(site):
    guest = guest_named(NAMES[1])
    start_trial(guest, confirm_s=20)
    wait_for_restore(guest)
    assert_bare(guest)
    guest.run("! /usr/local/lib/spark/current/bin/spark-host fabric confirm")
    assert_bare(guest)


def test_network_change_that_breaks_login_is_reverted(site, renderer):
    guest = guest_named(NAMES[1])
    before = guest.run(MANAGEMENT_STATE)
    assert "fd00:7::5/64" in before
    # Late enough that no running network setup adds the address again.
    cut = f"sleep 4; {LOSE[renderer]}; touch {CUT}"
    folder = "/etc/systemd/system/spark-fabric-apply.service.d"
    guest.run(f"mkdir -p {folder}; printf '[Service]\nExecStopPost=/bin/sh -c \"{cut}\"\n' "
              f"> {folder}/cut.conf; systemctl daemon-reload")  # fmt: skip
    run = site.deploy("--limit", guest.name, deploy=FABRIC)
    guest.run(f"rm -r {folder}; systemctl daemon-reload")
    assert guest.run(f"ls {CUT} 2>&1", check=False).strip() == CUT, run.stderr[-4000:]
    assert run.exit_code != 0
    assert_bare(guest)
    assert guest.run(MANAGEMENT_STATE) == before


def test_power_cut_reverts_network_trial(site):
    guest = guest_named(NAMES[1])
    start_trial(guest, confirm_s=600)
    guest.power_cut()
    lay_cables()
    guest.run("netplan apply")
    assert addresses(guest)["fab0"][0] == []
    assert netplan_files(guest) == []


def test_controller_killed_during_network_trial_leaves_old_or_new_network(site):
    guest = guest_named(NAMES[1])
    process = site.start(deploy=FABRIC)
    guest.wait(f"test -e {TRIAL} || test -e {FILE}", seconds=120)
    process.kill()
    process.wait()
    wait_for_restore(guest, seconds=180)
    assert bool(addresses(guest)["fab0"][0]) == (netplan_files(guest) == [FILE])
    site.deploy(deploy=FABRIC).assert_succeeded()
    assert addresses(guest)["fab0"] == (["192.168.100.12/24"], MTU)
