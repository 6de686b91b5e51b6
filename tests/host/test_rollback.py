"""Rollback, stop and start: announced first, done once, proven."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host.conftest import Fleet
from tests.labkit import lab
from tests.runs import Run
from tests.traces import footprint

ROLLBACK = "deploys/rollback.py"


def rollback(fleet: Fleet, *arguments: str, dry: bool = False) -> Run:
    return fleet.site.deploy(*arguments, dry=dry, deploy=ROLLBACK)


def test_rollback_announces_target_and_next_deploy_reports_it(fleet: Fleet) -> None:
    fleet.settle()
    first = [guest.release() for guest in fleet.guests]
    fleet.site.choose(profile="v2-tq")
    assert fleet.site.deploy().exit_code == 0
    second = [guest.release() for guest in fleet.guests]
    before = [footprint(guest) for guest in fleet.guests]

    dry = rollback(fleet, dry=True)

    operations = [f"Rollback | Go back on {guest.name}" for guest in fleet.guests]
    assert dry.predicted == operations
    for old, new in zip(first, second, strict=True):
        assert f"goes back from {new} (lab-stub with v2-tq) to {old} (lab-stub with v2)" in (
            dry.stderr
        )
    assert [footprint(guest) for guest in fleet.guests] == before

    done = rollback(fleet)

    assert (done.exit_code, done.changed) == (0, operations), done.stderr[-3000:]
    for guest, old in zip(fleet.guests, first, strict=True):
        assert guest.release() == old
        assert guest.boots() == guest.serving()
        assert guest.answers()
    # A second rollback without a target makes no change.
    again = rollback(fleet)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    assert "to go further back, name a release" in again.stderr

    dry_deploy = fleet.site.deploy(dry=True)
    for guest, old, new in zip(fleet.guests, first, second, strict=True):
        assert f"was rolled back from {new} to {old}" in dry_deploy.stderr
        assert f"Serve | Serve the release on {guest.name}" in dry_deploy.predicted
        assert guest.release() == old
    # With matching settings no work is left.
    fleet.site.choose(profile="v2")
    agreed = fleet.site.deploy()
    assert (agreed.exit_code, agreed.changed) == (0, []), agreed.stderr[-3000:]
    assert "was rolled back" not in agreed.stderr


def test_rolls_back_to_named_release(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    named = guest.release()
    for profile in ("v2-tq", "agent"):
        fleet.site.choose(profile=profile)
        assert fleet.site.deploy("--limit", guest.name).exit_code == 0
    last = footprint(guest)

    unknown = rollback(
        fleet, "--limit", guest.name, "--data", "releases.rollback_to=main-0123456789ab"
    )

    assert unknown.exit_code != 0
    assert "is not a release on this host" in unknown.stderr
    assert named in unknown.stderr
    assert footprint(guest) == last

    done = rollback(fleet, "--limit", guest.name, "--data", f"releases.rollback_to={named}")

    assert done.exit_code == 0, done.stderr[-3000:]
    assert (guest.release(), guest.boots(), guest.answers()) == (named, guest.serving(), True)


@pytest.fixture
def start_afterwards(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.site.cli_output("start")


@pytest.mark.usefixtures("start_afterwards")
def test_stop_survives_reboot_and_deploy_until_start(fleet: Fleet) -> None:
    fleet.settle()
    guest, other = fleet.guests
    release, runs = guest.release(), footprint(other)

    code, output = fleet.site.cli_output("stop", "--limit", guest.name)

    assert code == 0, output
    assert guest.serving() == []
    assert guest.call("GET", "/v1/models")[0] == 503

    lab("break", "kill-guest", guest.name)
    lab("up", guest.name)
    guest.wait("systemctl is-active docker", seconds=90)
    guest.wait("systemctl is-system-running | grep -qE 'running|degraded'", seconds=60)
    assert guest.serving() == []

    # A deploy applies other changes and keeps the stop.
    fleet.site.choose(serve={"names": ["chosen-meanwhile"]})
    for changed_again in (True, False):
        run = fleet.site.deploy("--limit", guest.name)
        assert run.exit_code == 0, run.stderr[-3000:]
        assert "stopped on purpose by" in run.stderr
        assert bool(run.changed) == changed_again, run.changed
        assert guest.serving() == []
    code, output = fleet.site.cli_output("status", "--limit", guest.name)
    assert (code, "stopped on purpose by" in output) == (1, True), output

    code, output = fleet.site.cli_output("start", "--limit", guest.name)

    assert (code, f"{release} is up" in output) == (0, True), output
    assert (guest.release(), guest.answers()) == (release, True)
    assert footprint(other) == runs
    fleet.settle()
    fleet.site.deploy().assert_unchanged()
