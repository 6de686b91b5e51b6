"""Back to what served before, and out of service and back: said first, done once, proven."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host.conftest import Fleet
from tests.labkit import Guest, lab
from tests.runs import Run
from tests.traces import footprint

ROLLBACK = "deploys/rollback.py"
CAPITAL = "What is the capital of France?"


def go_back(fleet: Fleet, *arguments: str, dry: bool = False) -> Run:
    return fleet.site.deploy(*arguments, dry=dry, deploy=ROLLBACK)


def answers(guest: Guest) -> bool:
    status, body = guest.ask(CAPITAL)
    return status == 200 and "Paris" in str(body)


def test_going_back_says_where_to_then_does_it_and_the_next_deploy_says_what_it_does(
    fleet: Fleet,
) -> None:
    fleet.settle()
    first = [guest.release() for guest in fleet.guests]
    fleet.site.choose(profile="v2-tq")
    assert fleet.site.deploy().exit_code == 0
    second = [guest.release() for guest in fleet.guests]
    before = [footprint(guest) for guest in fleet.guests]

    dry = go_back(fleet, dry=True)

    wanted = [f"Rollback | Go back on {guest.name}" for guest in fleet.guests]
    assert dry.predicted == wanted
    for old, new in zip(first, second, strict=True):
        assert f"goes back from {new} (lab-stub with v2-tq) to {old} (lab-stub with v2)" in (
            dry.stderr
        )
    assert [footprint(guest) for guest in fleet.guests] == before

    done = go_back(fleet)

    assert (done.exit_code, done.changed) == (0, wanted), done.stderr[-3000:]
    for guest, old in zip(fleet.guests, first, strict=True):
        assert guest.release() == old
        assert guest.boots() == guest.serving()
        assert answers(guest)
    # A second time it goes no further back by itself.
    again = go_back(fleet)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    assert "to go further back name a release" in again.stderr

    told = fleet.site.deploy(dry=True)
    for guest, old, new in zip(fleet.guests, first, second, strict=True):
        assert f"was rolled back from {new} to {old}" in told.stderr
        assert f"Serve | Serve the release on {guest.name}" in told.predicted
        assert guest.release() == old
    # Group_vars that say so too make the way back the plan: nothing is left to do.
    fleet.site.choose(profile="v2")
    agreed = fleet.site.deploy()
    assert (agreed.exit_code, agreed.changed) == (0, []), agreed.stderr[-3000:]
    assert "was rolled back" not in agreed.stderr


def test_going_back_to_a_named_release_passes_over_the_one_between(fleet: Fleet) -> None:
    fleet.settle()
    one = fleet.guests[0]
    named = one.release()
    for profile in ("v2-tq", "agent"):
        fleet.site.choose(profile=profile)
        assert fleet.site.deploy("--limit", one.name).exit_code == 0
    last = footprint(one)

    unknown = go_back(
        fleet, "--limit", one.name, "--data", "releases.rollback_to=main-0123456789ab"
    )

    assert unknown.exit_code != 0
    assert "is not a release on this host" in unknown.stderr
    assert named in unknown.stderr
    assert footprint(one) == last

    there = go_back(fleet, "--limit", one.name, "--data", f"releases.rollback_to={named}")

    assert there.exit_code == 0, there.stderr[-3000:]
    assert (one.release(), one.boots(), answers(one)) == (named, one.serving(), True)


@pytest.fixture
def started_again(fleet: Fleet) -> Iterator[None]:
    """Leave no host stopped behind, whatever becomes of the test."""
    yield
    fleet.site.tool("start")


@pytest.mark.usefixtures("started_again")
def test_a_stop_outlives_a_reboot_and_a_deploy_until_somebody_starts_it(fleet: Fleet) -> None:
    fleet.settle()
    one, other = fleet.guests
    release, runs = one.release(), footprint(other)

    code, said = fleet.site.tool("stop", "--limit", one.name)

    assert code == 0, said
    assert one.serving() == []
    assert one.call("GET", "/v1/models")[0] == 503

    lab("break", "kill-guest", one.name)
    lab("up", one.name)
    one.wait("systemctl is-active docker", seconds=90)
    one.wait("systemctl is-system-running | grep -qE 'running|degraded'", seconds=60)
    assert one.serving() == []

    # What else changed meanwhile is done; only the stop is left as it is.
    fleet.site.choose(serve={"names": ["chosen-meanwhile"]})
    for changed_again in (True, False):
        run = fleet.site.deploy("--limit", one.name)
        assert run.exit_code == 0, run.stderr[-3000:]
        assert "stopped on purpose by" in run.stderr
        assert "`spark-deploy start` starts it" in run.stderr
        assert bool(run.changed) == changed_again, run.changed
        assert one.serving() == []
    code, told = fleet.site.tool("status", "--limit", one.name)
    assert (code, "stopped on purpose by" in told) == (1, True), told

    code, said = fleet.site.tool("start", "--limit", one.name)

    assert (code, f"{release} is up" in said) == (0, True), said
    assert (one.release(), answers(one)) == (release, True)
    assert footprint(other) == runs
    fleet.settle()
    fleet.site.deploy().must_have_changed_nothing()
