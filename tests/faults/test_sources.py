"""Trouble with hub or disk is one clear line, loses nothing, and heals by running again."""

from __future__ import annotations

import json

import pytest

from tests.host.conftest import Fleet
from tests.labkit import Guest, lab

WEIGHTS = "model-*.safetensors"


def forget_artefacts(guest: Guest) -> None:
    """Take the trees away; what serves goes on with the files it has open."""
    guest.run("rm -rf /srv/spark/models/* /srv/spark/sources/*")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (["hub-down"], "10.77.0.1:8082"),
        (["hub-wrong-hash", "--match", WEIGHTS], "sha256"),
        (["hub-truncate", "--match", WEIGHTS], "error"),
    ],
    ids=["hub down", "wrong bytes", "cut short"],
)
def test_the_hub_misbehaves(fleet: Fleet, fault: list[str], said: str) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    before = guest.serving()
    forget_artefacts(guest)

    lab("break", *fault)
    try:
        run = fleet.site.deploy("--limit", guest.name)
    finally:
        lab("break", fault[0], "--heal")

    assert run.exit_code != 0
    errors = [line for line in run.stderr.splitlines() if "error:" in line]
    assert any(said in line for line in errors), run.stderr[-3000:]
    assert "Traceback" not in run.stderr
    assert guest.serving() == before
    assert not guest.run("ls /srv/spark/models /srv/spark/sources | grep -v : || :").strip()

    healed = fleet.site.deploy("--limit", guest.name)
    assert healed.exit_code == 0, healed.stderr[-3000:]
    assert fleet.site.deploy("--limit", guest.name).changed == []


def test_a_full_disk_is_refused_before_the_first_byte(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    before = guest.serving()
    forget_artefacts(guest)

    lab("break", "disk-full", guest.name)
    try:
        run = fleet.site.deploy("--limit", guest.name)
    finally:
        lab("break", "disk-full", guest.name, "--heal")

    assert run.exit_code != 0
    assert "free" in run.stderr
    assert "Traceback" not in run.stderr
    assert guest.serving() == before
    assert fleet.site.deploy("--limit", guest.name).exit_code == 0


def test_a_half_built_checkpoint_is_never_served(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    receipt = guest.run("ls /srv/spark/models/*/receipt.json")
    tree = receipt.removesuffix("/receipt.json")
    built = json.loads(guest.run(f"cat {receipt}"))["digest"]
    # A tree that lost a file, and one without its receipt: neither is whole.
    unit = guest.serving()[0]
    guest.run(f"systemctl stop {unit}; rm {tree}/config.json {receipt}")

    guest.run(f"systemctl start {unit}", check=False, timeout_s=300)
    assert guest.serving() == []
    run = fleet.site.deploy("--limit", guest.name)

    assert run.exit_code == 0, run.stderr[-3000:]
    assert json.loads(guest.run(f"cat {receipt}"))["digest"] == built
    assert guest.ask("What is the capital of France?")[0] == 200


def test_bytes_already_on_the_host_are_used(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    guest.run(
        "rm -rf /home/spark/.cache; mkdir -p /home/spark/.cache/huggingface/hub && "
        "cp -r /srv/spark/sources/* /home/spark/.cache/huggingface/hub/"
    )
    forget_artefacts(guest)

    lab("break", "hub-status", "--value", "503", "--match", WEIGHTS)
    try:
        run = fleet.site.deploy("--limit", guest.name)
    finally:
        lab("break", "hub-status", "--heal")

    # The donor's ranges still come from the hub: its files are not on the host.
    fetched = [name for name in run.changed if name.startswith("Sources")]
    assert fetched, run.stderr[-2000:]
    assert guest.run("ls /srv/spark/sources/*/receipt.json")
    fleet.settle()
