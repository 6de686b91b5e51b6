"""A change goes over three hosts one by one: up to the first failure, and past a host that is gone.

The three guests are the lab's own; `SPARK_ROLLING_GUESTS` names others.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.labkit import Guest, Site, info, lab

NAMES = os.environ.get("SPARK_ROLLING_GUESTS", "lab-13 lab-14 lab-15").split()
GARBAGE = {"environment": {"STUB_FAULT": "garbage"}}
CAPITAL = "What is the capital of France?"


class Three:
    """Three hosts that serve the stub engine, in the order in which a change reaches them."""

    def __init__(self, site: Site):
        self.site = site
        known = {guest["name"]: guest["ip"] for guest in info()["guests"]}
        self.guests = [Guest(name, known[name]) for name in NAMES]

    def settle(self) -> list[str]:
        """Have all of them serve the usual release; return which."""
        self.site.choices.clear()
        self.host(NAMES[1], "")
        self.site.choose(model="lab-stub", profile="v2")
        run = self.site.deploy()
        assert run.exit_code == 0, run.stderr[-4000:]
        return self.releases()

    def host(self, name: str, text: str) -> None:
        """Write what one host shall have other than the rest."""
        (self.site.root / "host_vars").mkdir(exist_ok=True)
        (self.site.root / f"host_vars/{name}.yml").write_text(text or "{}\n")

    def releases(self) -> list[str]:
        return [guest.release() for guest in self.guests]

    def changes(self) -> list[str]:
        """Return the changes of release that each host ever began."""
        return [guest.run("ls /var/lib/spark/switch") for guest in self.guests]

    def answer(self) -> bool:
        asked = [guest.ask(CAPITAL) for guest in self.guests]
        return all(status == 200 and "Paris" in str(body) for status, body in asked)

    def until(self, said: str) -> tuple[subprocess.Popen[str], str]:
        """Start a deploy; return it and what it printed as soon as it has said this."""
        process = self.site.start()
        seen = ""
        for line in process.stdout or ():
            seen += line
            if said in line:
                return process, seen
        raise AssertionError(f"never said {said!r}:\n{seen[-4000:]}")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    lab("up", *NAMES, "--fresh", "--engine", "stub")
    made = Three(Site(tmp_path_factory.mktemp("site"), hosts=NAMES))
    made.settle()
    yield made
    for name in NAMES:
        lab("down", name)


def test_a_bad_release_reaches_one_host_and_all_three_serve_the_old_one(three: Three) -> None:
    old, began = three.settle(), three.changes()

    three.site.choose(engine=GARBAGE)
    run = three.site.deploy()

    assert run.exit_code != 0
    assert "rolled-back" in run.stderr
    for name, release in zip(NAMES[1:], old[1:], strict=True):
        assert f"{name}: left alone on {release}, because {NAMES[0]} failed first" in run.stderr
    assert (three.releases(), three.answer()) == (old, True)
    assert three.changes()[0] != began[0]
    assert three.changes()[1:] == began[1:]
    three.settle()
    three.site.deploy().must_have_changed_nothing()


def test_a_failure_in_the_middle_leaves_what_is_done_and_what_is_to_come(three: Three) -> None:
    old = three.settle()

    three.site.choose(serve={"names": ["renamed"]})
    three.host(NAMES[1], "engine: {environment: {STUB_FAULT: garbage}}\n")
    run = three.site.deploy()

    assert run.exit_code != 0
    first, second, third = three.releases()
    assert first != old[0]
    assert (second, third) == (old[1], old[2])
    assert three.guests[0].names() == ["renamed"]
    assert f"left alone on {third}, because {NAMES[1]} failed first" in run.stderr
    assert three.answer()
    # What was done stays done: only the other two are left to change.
    three.host(NAMES[1], "")
    again = three.site.deploy()
    serve = [f"Serve | Serve the release on {name}" for name in NAMES]
    assert again.exit_code == 0, again.stderr[-3000:]
    assert [name for name in again.changed if name in serve] == serve[1:]
    assert len(set(three.releases())) == 1
    three.site.deploy().must_have_changed_nothing()


def test_a_host_that_is_down_blocks_nobody(three: Three) -> None:
    old = three.settle()
    down = three.guests[1]
    three.site.choose(serve={"names": ["renamed"]})

    lab("break", "host-down", down.name)
    try:
        run = three.site.deploy()
    finally:
        lab("break", "host-down", down.name, "--heal")

    assert run.exit_code != 0
    assert [three.guests[0].names(), three.guests[2].names()] == [["renamed"], ["renamed"]]
    down.wait("true")
    assert down.release() == old[1]
    again = three.site.deploy()
    assert again.exit_code == 0, again.stderr[-3000:]
    assert f"Serve | Serve the release on {down.name}" in again.changed
    assert len(set(three.releases())) == 1
    three.site.deploy().must_have_changed_nothing()


def test_a_host_that_drops_out_before_its_change_holds_up_the_others_for_minutes_at_most(
    three: Three,
) -> None:
    old = three.settle()
    lost = three.guests[0]
    three.site.choose(serve={"names": ["renamed"]})
    process, _ = three.until("Starting operation")

    lab("break", "host-down", lost.name)
    cut_at = time.monotonic()
    try:
        rest, _ = process.communicate(timeout=300)
    finally:
        lab("break", "host-down", lost.name, "--heal")

    assert process.returncode != 0
    assert time.monotonic() - cut_at < 200
    assert [guest.names() for guest in three.guests[1:]] == [["renamed"], ["renamed"]], rest[-4000:]
    assert "left alone" not in rest
    lost.wait("true")
    assert lost.release() == old[0]
    again = three.site.deploy()
    assert again.exit_code == 0, again.stderr[-3000:]
    assert len(set(three.releases())) == 1
    three.site.deploy().must_have_changed_nothing()


def test_a_host_that_loses_power_in_its_own_change_stops_the_change_of_the_others(
    three: Three,
) -> None:
    old, began = three.settle(), three.changes()
    lost = three.guests[0]
    three.site.choose(engine={"environment": {"STUB_LOAD_S": "20"}})
    process, _ = three.until("rollout of main-")

    time.sleep(3)
    lab("break", "kill-guest", lost.name)
    lab("up", lost.name)
    rest, _ = process.communicate(timeout=300)

    assert process.returncode != 0
    assert "interrupted" in rest, rest[-4000:]
    assert f"because {lost.name} failed first" in rest
    lost.wait(f"systemctl is-active spark-serve@{old[0]}", seconds=90)
    assert (three.releases(), three.answer()) == (old, True)
    assert three.changes()[1:] == began[1:]
    again = three.site.deploy()
    assert again.exit_code == 0, again.stderr[-3000:]
    three.settle()
    three.site.deploy().must_have_changed_nothing()
