import pytest

from tests.traces import footprint


def rollback(fleet, *arguments, dry=False):
    return fleet.site.deploy(*arguments, dry=dry, deploy="deploys/rollback.py")


def test_rollback_shows_both_releases_and_is_reported_by_the_next_deploy(fleet):
    fleet.settle()
    first = [guest.release() for guest in fleet.guests]
    fleet.site.choose(profile="v2-tq")
    fleet.site.deploy().assert_succeeded()
    second = [guest.release() for guest in fleet.guests]
    before = [footprint(guest) for guest in fleet.guests]

    dry = rollback(fleet, dry=True)

    operations = [f"Rollback | Roll back on {guest.name}" for guest in fleet.guests]
    assert dry.predicted == operations
    assert all(release in dry.stderr for release in (*first, *second))
    assert [footprint(guest) for guest in fleet.guests] == before

    assert rollback(fleet).assert_succeeded().changed == operations

    for guest, old in zip(fleet.guests, first, strict=True):
        assert guest.release() == old
        assert guest.boots() == guest.serving()
        assert guest.answers()
    rollback(fleet).assert_unchanged()

    dry_deploy = fleet.site.deploy(dry=True)
    for guest, old, new in zip(fleet.guests, first, second, strict=True):
        assert f"was rolled back from {new} to {old}" in dry_deploy.stderr
        assert f"Serve | Serve the release on {guest.name}" in dry_deploy.predicted
    fleet.site.choose(profile="v2")
    assert "was rolled back" not in fleet.site.deploy().assert_unchanged().stderr


def test_rollback_to_a_named_release_serves_it(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    only, named = ("--limit", guest.name), guest.release()
    for profile in ("v2-tq", "agent"):
        fleet.site.choose(profile=profile)
        fleet.site.deploy(*only).assert_succeeded()
    last = footprint(guest)

    unknown = rollback(fleet, *only, "--data", "releases.rollback_to=main-0123456789ab")

    assert unknown.exit_code != 0
    assert named in unknown.stderr
    assert footprint(guest) == last

    rollback(fleet, *only, "--data", f"releases.rollback_to={named}").assert_succeeded()

    assert (guest.release(), guest.boots(), guest.answers()) == (named, guest.serving(), True)


@pytest.fixture
def start_afterwards(fleet):
    yield
    fleet.site.cli_output("start", "-y")


@pytest.mark.usefixtures("start_afterwards")
def test_stopped_service_stays_stopped_after_reboot_and_deploy_until_started(fleet):
    fleet.settle()
    guest, other = fleet.guests
    only, release, of_other = ("--limit", guest.name), guest.release(), footprint(other)

    code, output = fleet.site.cli_output("stop", *only)

    assert code == 0, output
    assert guest.serving() == []
    assert guest.call("GET", "/v1/models")[0] == 503

    guest.power_cut()
    guest.wait_until_booted()
    assert guest.serving() == []

    fleet.site.choose(serve={"names": ["chosen-meanwhile"]})
    for changes in (True, False):
        run = fleet.site.deploy(*only).assert_succeeded()
        assert "stopped on purpose by" in run.stderr
        assert bool(run.changed) == changes, run.changed
        assert guest.serving() == []
    code, output = fleet.site.cli_output("status", *only)
    assert (code, "stopped on purpose by" in output) == (1, True), output

    code, output = fleet.site.cli_output("start", *only)

    assert code == 0, output
    assert (guest.release(), guest.answers()) == (release, True)
    assert footprint(other) == of_other
    fleet.settle()
    fleet.site.deploy().assert_unchanged()
