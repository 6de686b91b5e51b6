import os
import time

import pytest

from tests.labkit import Site, broken, guest_named, lab

NAMES = os.environ.get("SPARK_ROLLING_GUESTS", "lab-13 lab-14 lab-15").split()
GARBAGE = {"environment": {"STUB_FAULT": "garbage"}}


class Three:
    def __init__(self, site):
        self.site = site
        self.guests = [guest_named(name) for name in NAMES]

    def settle(self):
        self.site.choices.clear()
        self.set_host_vars(NAMES[1], "")
        self.site.choose(model="lab-stub", profile="v2")
        self.site.deploy().assert_succeeded()
        return self.releases()

    def set_host_vars(self, name, text):
        (self.site.root / "host_vars").mkdir(exist_ok=True)
        (self.site.root / f"host_vars/{name}.yml").write_text(text or "{}\n")

    def releases(self):
        return [guest.release() for guest in self.guests]

    def rollouts(self):
        return [guest.run("ls /var/lib/spark/switch") for guest in self.guests]

    def all_answer(self):
        return all(guest.answers() for guest in self.guests)

    def start_deploy(self, until):
        process = self.site.start()
        output = ""
        for line in process.stdout or ():
            output += line
            if until in line:
                return process
        raise AssertionError(f"never printed {until!r}:\n{output[-4000:]}")

    def assert_next_deploy_aligns_all(self):
        run = self.site.deploy().assert_succeeded()
        assert len(set(self.releases())) == 1
        self.site.deploy().assert_unchanged()
        return run


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    lab("up", *NAMES, "--fresh", "--engine", "stub")
    three = Three(Site(tmp_path_factory.mktemp("site"), hosts=NAMES))
    three.settle()
    yield three
    lab("down", *NAMES)


def test_faulty_release_stops_rollout_after_first_host(three):
    old, began = three.settle(), three.rollouts()

    three.site.choose(engine=GARBAGE)
    run = three.site.deploy()

    assert run.exit_code != 0
    assert "rolled-back" in run.stderr
    for name in NAMES[1:]:
        assert f"{name}: not changed: still serves " in run.stderr
    assert (three.releases(), three.all_answer()) == (old, True)
    assert three.rollouts()[0] != began[0]
    assert three.rollouts()[1:] == began[1:]
    three.settle()
    three.site.deploy().assert_unchanged()


def test_rollout_that_fails_on_a_host_skips_later_hosts(three):
    old = three.settle()

    three.site.choose(serve={"names": ["renamed"]})
    three.set_host_vars(NAMES[1], "engine: {environment: {STUB_FAULT: garbage}}\n")
    run = three.site.deploy()

    assert run.exit_code != 0
    first, second, third = three.releases()
    assert first != old[0]
    assert (second, third) == (old[1], old[2])
    assert three.guests[0].names() == ["renamed"]
    assert three.all_answer()
    three.set_host_vars(NAMES[1], "")
    again = three.assert_next_deploy_aligns_all()
    serve = [f"Serve | Serve the release on {name}" for name in NAMES]
    assert [name for name in again.changed if name in serve] == serve[1:]


def test_unreachable_host_does_not_block_rollout_on_others(three):
    old = three.settle()
    down = three.guests[1]
    three.site.choose(serve={"names": ["renamed"]})

    with broken("host-down", down.name):
        run = three.site.deploy()

    assert run.exit_code != 0
    assert [three.guests[0].names(), three.guests[2].names()] == [["renamed"], ["renamed"]]
    down.wait("true")
    assert down.release() == old[1]
    again = three.assert_next_deploy_aligns_all()
    assert f"Serve | Serve the release on {down.name}" in again.changed


def test_host_lost_before_its_rollout_delays_other_hosts_only_by_minutes(three):
    old = three.settle()
    lost = three.guests[0]
    three.site.choose(serve={"names": ["renamed"]})
    process = three.start_deploy(until="Starting operation")

    with broken("host-down", lost.name):
        cut_at = time.monotonic()
        rest, _ = process.communicate(timeout=300)

    assert process.returncode != 0
    assert time.monotonic() - cut_at < 200
    assert [guest.names() for guest in three.guests[1:]] == [["renamed"], ["renamed"]], rest[-4000:]
    assert "not changed: still serves" not in rest
    lost.wait("true")
    assert lost.release() == old[0]
    three.assert_next_deploy_aligns_all()


def test_power_cut_during_first_hosts_rollout_does_not_change_other_hosts(three):
    old, began = three.settle(), three.rollouts()
    lost = three.guests[0]
    three.site.choose(engine={"environment": {"STUB_LOAD_S": "20"}})
    process = three.start_deploy(until="rollout of main-")

    time.sleep(3)
    lost.power_cut()
    rest, _ = process.communicate(timeout=300)

    assert process.returncode != 0
    assert "interrupted" in rest, rest[-4000:]
    lost.wait(f"systemctl is-active spark-serve@{old[0]}", seconds=90)
    assert (three.releases(), three.all_answer()) == (old, True)
    assert three.rollouts()[1:] == began[1:]
    three.site.deploy().assert_succeeded()
    three.settle()
    three.site.deploy().assert_unchanged()
