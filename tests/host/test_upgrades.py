import json
from typing import Any

import pytest

from tests.labkit import SPARE, Site, guest_named, lab

FIRST, SECOND = SPARE
OLD, NEW = "580.159.03+labstub", "580.173.02+labstub"
EDGE = "/usr/lib/labstub/proc-driver"
CDI = "Docker | Generate the CDI specification"
GPU_PROOF = "Docker | Check the GPU in a container"


class TwoHosts:
    def __init__(self, root):
        lab("up", FIRST, SECOND, "--fresh", "--engine", "stub")
        self.site = Site(root, hosts=[FIRST, SECOND])
        self.site.choose(model="lab-stub", profile="v2", check={"bench_s": 3})
        self.guests = [guest_named(name) for name in (FIRST, SECOND)]
        self.site.deploy().assert_succeeded()

    def status(self, name):
        result = self.site.cli("status", "--limit", name, "--json")
        status: dict[str, Any] = json.loads(result.stdout)[0]
        return status


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    new_hosts = TwoHosts(tmp_path_factory.mktemp("site"))
    yield new_hosts
    lab("down", FIRST, SECOND)


def boot_of(guest):
    return guest.run("cat /proc/sys/kernel/random/boot_id")


def set_driver(guest, old, new):
    guest.run(f"sed -i 's/{old}/{new}/' {EDGE}/nvidia/version $(command -v nvidia-smi)")


def assert_changed_only(run, *names):
    run.assert_succeeded()
    assert run.changed == list(names), run.stderr[-4000:]


def test_deploy_after_driver_update_checks_the_server_again_without_restart(hosts):
    guest = hosts.guests[0]
    before = guest.invocation()
    guest.run(
        "mkdir -p /etc/cdi; printf 'kind: nvidia.com/gpu\\n- hostPath: /x/libcuda.so.%s\\n' "
        f"{OLD} > /etc/cdi/nvidia.yaml"
    )
    set_driver(guest, OLD, NEW)
    status = hosts.status(FIRST)

    run = hosts.site.deploy("--limit", FIRST)

    assert f"driver {OLD} -> {NEW}" in status["proof"]["why"]
    assert_changed_only(run, CDI, GPU_PROOF, f"Serve | Serve the release on {FIRST}")
    assert f"libcuda.so.{NEW}" in guest.run("cat /etc/cdi/nvidia.yaml")
    assert guest.invocation() == before
    assert hosts.status(FIRST)["proof"]["last_full"]["versions"]["driver"] == NEW
    assert_changed_only(hosts.site.deploy("--limit", FIRST))


def test_deploy_warns_about_a_slower_server_and_offers_rollback(hosts):
    guest = hosts.guests[0]
    guest.run("echo slow > /run/spark/engines/main/stub-fault")
    set_driver(guest, NEW, "580.178.04+labstub")
    run = hosts.site.deploy("--limit", FIRST)
    guest.run("rm /run/spark/engines/main/stub-fault")
    status = hosts.status(FIRST)

    assert_changed_only(run, CDI, GPU_PROOF, f"Serve | Serve the release on {FIRST}")
    assert status["proof"]["speed"]
    assert status["events"][-1]["kind"] == "slower"
    assert guest.answers()
    assert_changed_only(hosts.site.deploy("--limit", FIRST))


def test_deploy_reports_pending_reboot_without_rebooting(hosts):
    guest = hosts.guests[1]
    boot = boot_of(guest)
    guest.run("echo linux-image-x > /run/reboot-required.pkgs; touch /run/reboot-required")

    assert_changed_only(hosts.site.deploy("--limit", SECOND))
    assert hosts.status(SECOND)["reboot_pending"]
    assert boot_of(guest) == boot


def test_deploy_reboots_hosts_one_by_one_if_allowed(hosts):
    first, second = hosts.guests
    boots = [boot_of(guest) for guest in hosts.guests]
    # Half an upgrade: the library is new, but only a reboot loads the new module.
    first.run(
        f"mv {EDGE} {EDGE}.old && cp -a {EDGE}.old {EDGE} && "
        f"sed -i 's/580[.0-9]*+labstub/{OLD}/' {EDGE}/nvidia/version $(command -v nvidia-smi) && "
        "mkdir -p /run/labstub && echo mismatch > /run/labstub/nvidia-smi"
    )
    second.run("touch /run/reboot-required")
    refused = hosts.site.deploy("--limit", FIRST)
    with hosts.site.chosen(reboot="allow"):
        run, again = hosts.site.deploy(timeout_s=1200), hosts.site.deploy()

    assert refused.exit_code != 0
    run.assert_succeeded()
    assert {name for name in run.changed if name.startswith("Reboots")} == {
        f"Reboots | Reboot {FIRST} if required",
        f"Reboots | Reboot {SECOND} if required",
    }
    assert all(boot_of(guest) != boot for guest, boot in zip(hosts.guests, boots, strict=True))
    # The second host rebooted after the first was proven.
    proven_s = int(first.run("date +%s -d $(sed -n 's/.*\"at\": \"\\(.*\\)\".*/\\1/p' "
                             "/var/lib/spark/good/main.json)"))  # fmt: skip
    assert proven_s <= int(second.run("stat -c %Y /proc/1"))
    for guest in hosts.guests:
        assert guest.answers()
    assert hosts.status(FIRST)["proof"]["last_full"]["versions"]["driver"] == OLD
    again.assert_unchanged()
