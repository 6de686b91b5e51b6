"""After any fault, kill or power cut in a rollout, a proven release serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from memory_host import Model
from memory_systemd import A, B
from spark_contract.errors import HostToolError
from spark_host.records import boot

FAULTS = ("kill before", "kill after", "cut before", "cut after", "reboot", "fail", "late", "hang",
          "full", "dies", "stop", "again", "other")  # fmt: skip


@dataclass(frozen=True)
class Story:
    before: tuple[str, ...] = ()  # deployed without a fault
    wanted: str = B
    broken: str = ""  # the step at which the wanted release fails
    event: str = ""  # before the rollout

    def begun(self) -> Model:
        model = Model()
        for name in self.before:
            model.deploy(name)
        if self.broken:
            model.broken[self.wanted] = self.broken
        if self.event == "upgrade":
            model.upgrade()
        elif self.event == "boot":
            model.boot()
        model.calls = 0
        model.history.clear()
        return model


STORIES = {
    "a first release": Story(),
    **{f"a first release that fails: {at}": Story(broken=at) for at in ("dies", "quick", "full")},
    "another release": Story((A,)),
    **{f"another one that fails: {at}": Story((A,), broken=at)
       for at in ("dies", "quick", "full", "hangs")},
    "the way back": Story((A, B), wanted=A),
    "the same release again": Story((A,), wanted=A),
    "the only one, broken by an upgrade": Story((A,), wanted=A, event="upgrade", broken="full"),
    "the same after a boot": Story((A,), wanted=A, event="boot"),
    "the same after an upgrade": Story((B, A), wanted=A, event="upgrade"),
    "the same, broken by an upgrade": Story((B, A), wanted=A, event="upgrade", broken="full"),
    "another release after an upgrade": Story((A,), event="upgrade"),
}  # fmt: skip


def ends_well(model: Model, story: Story) -> None:
    model.faults.clear()
    model.calls_of_first = model.calls
    model.full = False
    model.settle()
    model.prove()
    host = model.host()
    sound = [name for name in (A, B) if name not in model.broken]
    if boot.is_stopped("main", host):
        try:
            boot.start_service("main", host)
        except HostToolError:  # of a first release
            assert not boot.good("main", host).release
    model.deploy(story.wanted)
    good_before = boot.good("main", host).release
    if story.wanted in sound:
        assert model.outcome(story.wanted).state == "switched"
        assert model.serves() == story.wanted
    else:
        assert model.serves() in (*sound, None)
        assert good_before != story.wanted or model.serves() is None
    other = A if story.wanted == B else B
    model.deploy(other)
    assert model.outcome(other).state == "switched"
    assert model.serves() == other
    assert boot.enabled("main", host) == [other]
    model.boot()
    assert model.serves() == other


def lives_through(story: Story, faults: dict[int, str], then: Sequence[str] = ()) -> Model:
    model = story.begun()
    served = model.serves()
    model.faults = dict(faults)
    try:
        model.deploy(story.wanted)
        for step in then:
            {A: partial(model.deploy, A), B: partial(model.deploy, B),
             "boot": model.boot, "upgrade": model.upgrade}[step]()  # fmt: skip
        # With two faults both candidate and rollback may fail.
        alone = len(faults) == 1 and not then and "stop" not in faults.values()
        if served and alone and not story.broken:
            model.settle()
            assert model.serves(), "one fault has ended a service"
            if story.wanted == served:
                assert model.serves() == served, "one fault has ended a release that serves"
        ends_well(model, story)
    except AssertionError as error:
        lines = "\n".join(model.history[-80:])
        raise AssertionError(f"{error}\n{story} {faults} {then}\n{lines}") from error
    return model


# Always tested; the other stories are slow tests.
PLAIN = ("a first release", "another release")


@pytest.mark.parametrize(
    "name", [one if one in PLAIN else pytest.param(one, marks=pytest.mark.slow) for one in STORIES]
)
def test_a_fault_at_every_call(name: str) -> None:
    story = STORIES[name]
    calls = lives_through(story, {}).calls_of_first
    for number in range(1, calls + 1):
        for fault in FAULTS:
            lives_through(story, {number: fault})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a first release", "another release", "the way back"])
def test_two_kills_at_every_call(name: str) -> None:
    story = STORIES[name]
    calls = lives_through(story, {}).calls_of_first
    for number in range(1, calls + 1):
        for later in range(1, 30, 3):
            lives_through(story, {number: "kill after", number + later: "kill before"})


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    story=st.sampled_from(list(STORIES.values())),
    faults=st.dictionaries(st.integers(1, 120), st.sampled_from(FAULTS), max_size=6),
    then=st.lists(st.sampled_from((A, B, "boot", "upgrade")), max_size=3),
)
@example(STORIES["another release"], {40: "fail", 48: "fail", 78: "kill after"}, [A])
@example(STORIES["the same release again"], {64: "fail", 77: "fail", 120: "fail"}, [B, A])
def test_any_history_ends_with_a_proven_release(
    story: Story, faults: dict[int, str], then: list[str]
) -> None:
    lives_through(story, faults, then)
