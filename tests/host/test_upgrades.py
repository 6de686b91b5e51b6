"""After an upgrade of a host the next run says what changed, proves again, and offers a way back.

The versions are those of the stand-ins at the host's edge: nothing here is a driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.labkit import SPARE, Guest, Site, info, lab
from tests.runs import Run

FIRST, SECOND = SPARE
OLD, NEW = "580.159.03+labstub", "580.173.02+labstub"
EDGE = "/usr/lib/labstub/proc-driver"
CDI = "Docker | Generate the CDI specification"
GPU_PROOF = "Docker | Check the GPU in a container"


class Pair:
    """Two hosts of their own that serve the stub engine."""

    def __init__(self, root: Any):
        lab("up", FIRST, SECOND, "--fresh", "--engine", "stub")
        self.site = Site(root, hosts=[FIRST, SECOND])
        self.site.choose(model="lab-stub", profile="v2", check={"bench_s": 3})
        known = {guest["name"]: guest["ip"] for guest in info()["guests"]}
        self.guests = [Guest(name, known[name]) for name in (FIRST, SECOND)]
        self.first = self.site.deploy()

    def status(self, name: str) -> dict[str, Any]:
        """Ask the command that people use."""
        looked = self.site.look("status", "--limit", name, "--json")
        found: dict[str, Any] = json.loads(looked.stdout)[0]
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("site"))
    assert made.first.exit_code == 0, made.first.stderr[-6000:]
    yield made
    lab("down", FIRST, SECOND)


def run_of(guest: Guest) -> str:
    """Return the identity of the engine's present run, by systemd's word."""
    return guest.run("systemctl show -p InvocationID --value 'spark-serve@*'")


def boot_of(guest: Guest) -> str:
    return guest.run("cat /proc/sys/kernel/random/boot_id")


def upgraded(guest: Guest, old: str, new: str) -> None:
    """Have module and library say another version, as after an upgrade and a reboot."""
    guest.run(f"sed -i 's/{old}/{new}/' {EDGE}/nvidia/version $(command -v nvidia-smi)")


def only(run: Run, *names: str) -> None:
    assert run.exit_code == 0, run.stderr[-4000:]
    assert run.changed == list(names), run.stderr[-4000:]


def test_a_new_driver_is_named_and_proven_without_a_restart(pair: Pair) -> None:
    guest = pair.guests[0]
    before = run_of(guest)
    guest.run(
        "mkdir -p /etc/cdi; printf 'kind: nvidia.com/gpu\\n- hostPath: /x/libcuda.so.%s\\n' "
        f"{OLD} > /etc/cdi/nvidia.yaml"
    )
    upgraded(guest, OLD, NEW)
    seen = pair.status(FIRST)

    run = pair.site.deploy("--limit", FIRST)

    assert f"driver {OLD} -> {NEW}" in seen["proof"]["why"]
    assert f"driver {OLD} -> {NEW}" in run.stderr
    only(run, CDI, GPU_PROOF, f"Serve | Serve the release on {FIRST}")
    assert f"libcuda.so.{NEW}" in guest.run("cat /etc/cdi/nvidia.yaml")
    assert "speed: one stream" in run.stderr
    assert run_of(guest) == before
    assert pair.status(FIRST)["proof"]["last_full"]["versions"]["driver"] == NEW
    only(pair.site.deploy("--limit", FIRST))


def test_a_server_that_got_clearly_slower_is_told_with_a_way_back(pair: Pair) -> None:
    guest = pair.guests[0]
    guest.run("echo slow > /run/spark/engines/main/stub-fault")
    upgraded(guest, NEW, "580.178.04+labstub")
    try:
        run = pair.site.deploy("--limit", FIRST)
    finally:
        guest.run("rm /run/spark/engines/main/stub-fault")
    told = pair.status(FIRST)

    only(run, CDI, GPU_PROOF, f"Serve | Serve the release on {FIRST}")
    assert f"clearly slower after driver {NEW} -> 580.178.04+labstub: one stream" in run.stderr
    assert f"to go back: restore driver {NEW} only together with its kernel" in run.stderr
    assert any("clearly slower" in text for text in told["proof"]["speed"])
    assert told["events"][-1]["kind"] == "slower"
    # It answers right, so it serves on.
    assert guest.ask("What is the capital of France?")[0] == 200
    only(pair.site.deploy("--limit", FIRST))


def test_a_pending_reboot_is_told_and_left_to_people(pair: Pair) -> None:
    guest = pair.guests[1]
    boot = boot_of(guest)
    guest.run("echo linux-image-x > /run/reboot-required.pkgs; touch /run/reboot-required")

    run = pair.site.deploy("--limit", SECOND)

    only(run)
    assert "reboot: pending: /run/reboot-required is set (linux-image-x)" in run.stderr
    assert pair.status(SECOND)["reboot_pending"].startswith("/run/reboot-required is set")
    assert boot_of(guest) == boot


def test_reboots_that_are_allowed_are_done_one_by_one_and_end_proven(pair: Pair) -> None:
    first, second = pair.guests
    boots = [boot_of(guest) for guest in pair.guests]
    # Half an upgrade: the library is new, the module in memory is not; only a reboot loads it.
    first.run(
        f"mv {EDGE} {EDGE}.old && cp -a {EDGE}.old {EDGE} && "
        f"sed -i 's/580[.0-9]*+labstub/{OLD}/' {EDGE}/nvidia/version $(command -v nvidia-smi) && "
        "mkdir -p /run/labstub && echo mismatch > /run/labstub/nvidia-smi"
    )
    second.run("touch /run/reboot-required")
    refused = pair.site.deploy("--limit", FIRST)
    pair.site.choose(reboot="allow")
    try:
        run, again = pair.site.deploy(timeout_s=1200), pair.site.deploy()
    finally:
        pair.site.choices.pop("reboot")
        pair.site.choose()

    assert refused.exit_code != 0
    assert "set reboot: allow" in refused.stderr
    assert run.exit_code == 0, run.stderr[-6000:]
    assert {name for name in run.changed if name.startswith("Reboots")} == {
        f"Reboots | Reboot {FIRST} where it is due",
        f"Reboots | Reboot {SECOND} where it is due",
    }
    assert all(boot_of(guest) != boot for guest, boot in zip(pair.guests, boots, strict=True))
    # The second one went down only when the first one was proven.
    proven_s = int(first.run("date +%s -d $(sed -n 's/.*\"at\": \"\\(.*\\)\".*/\\1/p' "
                             "/var/lib/spark/good/main.json)"))  # fmt: skip
    assert proven_s <= int(second.run("stat -c %Y /proc/1"))
    for guest in pair.guests:
        assert guest.ask("What is the capital of France?")[0] == 200
    assert pair.status(FIRST)["proof"]["last_full"]["versions"]["driver"] == OLD
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-4000:]
