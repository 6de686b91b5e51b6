"""A host that changes by its own clock, and one that comes back after a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host.exposure import NAME, QUESTION, Place

DAY = {"model": "lab-stub", "profile": "v2"}
NIGHT = {"model": "lab-stub", "profile": "v2-tq"}
TIMERS = "systemctl list-timers --all --no-legend 'spark-hours@*' | wc -l"


@pytest.fixture
def day_again(place: Place) -> Iterator[None]:
    yield
    place.site.tool("start", NAME)
    for choice in ("schedule", "keep_ready"):
        place.site.choices.pop(choice, None)
    assert place.deploy().exit_code == 0


@pytest.mark.usefixtures("day_again")
def test_a_host_changes_at_its_time_and_a_deploy_leaves_it_there(place: Place) -> None:
    guest, site = place.guest, place.site
    day = guest.release()
    soon = guest.run("date -d '+5 minutes' +%H:%M").strip()
    site.choices |= {
        "keep_ready": [NIGHT],
        "schedule": [{"at": "03:00", **DAY}, {"at": soon, **NIGHT}],
    }
    first = place.deploy()
    assert first.exit_code == 0, first.stderr[-3000:]
    assert guest.release() == day
    assert guest.run(TIMERS).strip() == "2"
    site.deploy().must_have_changed_nothing()

    guest.wait("! systemctl is-active -q 'spark-serve@'" + day, seconds=420)
    guest.wait("systemctl is-active 'spark-serve@*' | grep -qx active", seconds=120)
    guest.wait("! systemctl list-units --state=activating 'spark-switch@*' | grep -q spark-switch",
               seconds=120)  # fmt: skip
    night = guest.release()
    assert night != day
    assert guest.answers(QUESTION, "35352137")
    assert guest.status()["services"]["main"]["good"] == night

    site.deploy().must_have_changed_nothing()
    assert guest.release() == night
    code, said = site.tool("status", NAME)
    assert (code, "as planned" in said) == (0, True), said

    # Without a schedule the plan is what is served, and nothing of the schedule is left.
    site.choices.pop("schedule")
    back = place.deploy()
    assert back.exit_code == 0, back.stderr[-3000:]
    assert guest.release() == day
    assert guest.run(TIMERS).strip() == "0"
    assert guest.run("ls /etc/systemd/system | grep -c spark-hours || true").strip() == "0"
    site.deploy().must_have_changed_nothing()


@pytest.mark.usefixtures("day_again")
def test_a_time_that_systemd_does_not_know_is_refused_before_the_host_is_changed(
    place: Place,
) -> None:
    place.site.choices |= {"keep_ready": [NIGHT], "schedule": [{"at": "25:99", **DAY}]}
    run = place.deploy()
    assert run.exit_code != 0
    assert "'25:99' is no time for the host's systemd" in run.stderr
    assert place.guest.run(TIMERS).strip() == "0"


@pytest.mark.usefixtures("day_again")
def test_a_stop_for_a_while_ends_by_itself_over_a_reboot(place: Place) -> None:
    guest = place.guest
    release = guest.release()
    code, said = place.site.tool("stop", NAME, "--for", "2m")
    assert (code, "stopped until 20" in said) == (0, True), said
    assert guest.serving() == []
    guest.reboot()
    assert guest.serving() == []
    code, told = place.site.tool("status", NAME)
    assert " until 20" in told
    guest.wait("systemctl is-active 'spark-serve@*' | grep -qx active", seconds=300)
    assert guest.release() == release
    assert guest.answers(QUESTION, "35352137")
    guest.wait("! systemctl is-enabled -q spark-return@main.timer", seconds=30)
    guest.wait("! systemctl is-active -q spark-return@main.timer", seconds=30)
    place.site.deploy().must_have_changed_nothing()
