"""A checkpoint that is not whole is never served, wherever its making was cut off."""

from __future__ import annotations

import json

from tests.faults.hold import JOBS, Hold, controller, die, next_runs
from tests.host.conftest import Fleet
from tests.labkit import Guest, lab

QUESTION = "What is the capital of France?"


def whole(guest: Guest) -> list[str]:
    """Return the trees that carry a receipt, hidden ones too."""
    found = guest.run(
        "find /srv/spark/models -mindepth 2 -name receipt.json -printf '%h\\n'"
    ).splitlines()
    return sorted(found)


def unfinished(guest: Guest) -> list[str]:
    """Return the files with content that lie in places where trees grow."""
    return guest.run("find /srv/spark/models -path '*/.*.partial/*' -type f -size +0").splitlines()


def only_the_served_tree(guest: Guest) -> str:
    """Drop every tree but the one that is served, so that another has to be built."""
    [unit] = guest.serving()
    release = unit.partition("@")[2].removesuffix(".service")
    tree: str = guest.json(f"cat /etc/spark/releases/{release}/release.json")["tree"]["path"]
    guest.run(f"find /srv/spark/models -mindepth 1 -maxdepth 1 ! -path {tree} -exec rm -rf {{}} +")
    return tree


def test_a_build_killed_in_the_middle_is_invisible_and_the_next_run_finishes_it(
    fleet: Fleet,
) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    tree, before = only_the_served_tree(guest), guest.serving()
    fleet.site.choose(profile="v2-native")  # has a tree of its own
    process = fleet.site.start("--limit", guest.name)
    with Hold.job(guest, "checkpoint", JOBS["checkpoint"]) as hold:
        held = hold.wait()
        assert unfinished(guest) != []

        guest.run(f"systemctl kill --kill-who=main -s KILL {held['unit']}")
        said, _ = process.communicate(timeout=120)

    assert process.returncode != 0
    assert "build lab-stub" in said
    assert "Traceback" not in said
    assert guest.unit(held["unit"], "Result") == {"Result": "signal"}
    assert unfinished(guest) != []
    assert whole(guest) == [tree]
    assert guest.serving() == guest.boots() == before
    assert guest.answers(QUESTION, "Paris")

    next_runs(fleet)

    assert unfinished(guest) == []
    assert whole(guest) == sorted([tree, held["proof"]["receipt"].removesuffix("/receipt.json")])
    assert guest.serving() != before


def test_a_power_cut_in_the_middle_of_a_build_goes_on_at_the_next_boot(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    tree, before = only_the_served_tree(guest), guest.serving()
    fleet.site.choose(profile="v2-native")
    with controller(fleet) as process, Hold.job(guest, "checkpoint", JOBS["checkpoint"]) as hold:
        held = hold.wait()
        assert unfinished(guest) != []
        assert whole(guest) == [tree]
        die(process)

        lab("break", "kill-guest", guest.name)
        hold.held = {}  # nothing of it lives
    lab("up", guest.name)

    guest.wait(f"systemctl is-active {before[0]}", seconds=90)
    assert guest.serving() == guest.boots() == before
    # No controller is there: the boot itself goes on with the job.
    guest.wait(f"test -e {held['proof']['receipt']}", seconds=90)
    assert guest.serving() == before
    assert guest.answers(QUESTION, "Paris")
    assert unfinished(guest) == []
    next_runs(fleet)
    assert guest.serving() != before


def test_a_choice_that_was_given_up_half_built_is_not_built_at_the_next_boot(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    only_the_served_tree(guest)
    limit = ("--limit", guest.name)
    boots_to_build = "ls /etc/systemd/system/multi-user.target.wants | grep ^spark-prepare@ || :"
    fleet.site.choose(profile="v2-native")
    with controller(fleet) as process, Hold.job(guest, "checkpoint", JOBS["checkpoint"]) as hold:
        hold.wait()
        die(process)
        assert len(guest.run(boots_to_build).splitlines()) == 1

        fleet.site.choose(profile="v2")
        run = fleet.site.deploy(*limit)

        assert run.exit_code == 0, run.stderr[-3000:]
        assert run.changed == ["Serve | Wait for all jobs"]
        assert guest.run(boots_to_build) == ""
    fleet.site.deploy(*limit).must_have_changed_nothing()


def test_a_finished_tree_that_lost_a_file_is_never_served(fleet: Fleet) -> None:
    guest = fleet.guests[0]
    fleet.settle(guest)
    tree = only_the_served_tree(guest)
    receipt = f"{tree}/receipt.json"
    built = json.loads(guest.run(f"cat {receipt}"))["digest"]
    # A tree that lost a file, and one without its receipt: neither is whole.
    unit = guest.serving()[0]
    guest.run(f"systemctl stop {unit}; rm {tree}/config.json {receipt}")

    guest.run(f"systemctl start {unit}", check=False, timeout_s=300)
    assert guest.serving() == []
    run = fleet.site.deploy("--limit", guest.name)

    assert run.exit_code == 0, run.stderr[-3000:]
    assert json.loads(guest.run(f"cat {receipt}"))["digest"] == built
    assert guest.answers(QUESTION, "Paris")
