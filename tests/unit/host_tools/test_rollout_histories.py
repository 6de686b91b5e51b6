from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulated_host import A, B, SimulatedHost
from spark_contract.tool import HostToolError
from spark_host.records import boot

FAULTS = ("kill before", "kill after", "cut before", "cut after", "reboot", "fail", "late", "hang",
          "full", "dies", "stop", "again", "other")  # fmt: skip


@dataclass(frozen=True)
class Story:
    before: tuple[str, ...] = ()
    target: str = B
    broken: str = ""
    event: str = ""

    def begin(self):
        sim = SimulatedHost()
        for name in self.before:
            sim.deploy(name)
        if self.broken:
            sim.broken[self.target] = self.broken
        if self.event == "upgrade":
            sim.upgrade()
        elif self.event == "boot":
            sim.boot()
        sim.calls = 0
        sim.history.clear()
        return sim


STORIES = {
    "first release": Story(),
    **{f"first release fails: {step}": Story(broken=step) for step in ("dies", "quick", "full")},
    "new release": Story((A,)),
    **{f"new release fails: {step}": Story((A,), broken=step)
       for step in ("dies", "quick", "full", "hangs")},
    "rollback": Story((A, B), target=A),
    "same release again": Story((A,), target=A),
    "only release, broken by an upgrade": Story((A,), target=A, event="upgrade", broken="full"),
    "same release after a boot": Story((A,), target=A, event="boot"),
    "same release after an upgrade": Story((B, A), target=A, event="upgrade"),
    "same release, broken by an upgrade": Story((B, A), target=A, event="upgrade", broken="full"),
    "new release after an upgrade": Story((A,), event="upgrade"),
}  # fmt: skip


def assert_recovers(sim, story):
    sim.faults.clear()
    sim.calls_of_first = sim.calls
    sim.disk_full = False
    sim.settle()
    sim.check_invariants()
    if boot.is_stopped("main", sim.host()):
        try:
            boot.start_service("main", sim.host())
        except HostToolError:
            assert not sim.known_good()
    sim.deploy(story.target)
    if story.target not in sim.broken:
        assert sim.outcome(story.target).state == "switched"
        assert sim.serving() == story.target
    else:
        assert sim.serving() != story.target
        assert sim.known_good() != story.target or sim.serving() is None
    other = A if story.target == B else B
    sim.deploy(other)
    assert sim.outcome(other).state == "switched"
    assert sim.serving() == other
    assert sim.enabled() == [other]
    sim.boot()
    assert sim.serving() == other


def run_story(story, faults, then=()):
    sim = story.begin()
    served = sim.serving()
    sim.faults = dict(faults)
    try:
        sim.deploy(story.target)
        for step in then:
            if step == "boot":
                sim.boot()
            elif step == "upgrade":
                sim.upgrade()
            else:
                sim.deploy(step)
        is_single = len(faults) == 1 and not then and "stop" not in faults.values()
        if served and is_single and not story.broken:
            sim.settle()
            assert sim.serving(), "a single fault stopped the service"
            if story.target == served:
                assert sim.serving() == served, "a single fault stopped a release that serves"
        assert_recovers(sim, story)
    except AssertionError as error:
        lines = "\n".join(sim.history[-80:])
        raise AssertionError(f"{error}\n{story} {faults} {then}\n{lines}") from error
    return sim


def run_with_faults(name, faults):
    story = STORIES[name]
    calls = run_story(story, {}).calls_of_first
    for number in range(1, calls + 1):
        for fault in faults:
            run_story(story, {number: fault})


def test_new_release_recovers_from_a_kill_or_failure_at_every_call():
    run_with_faults("new release", ("kill after", "cut after", "fail"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_recovers_from_a_fault_at_every_call(name):
    run_with_faults(name, FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first release", "new release", "rollback"])
def test_recovers_from_two_kills_at_every_call(name):
    story = STORIES[name]
    calls = run_story(story, {}).calls_of_first
    for number in range(1, calls + 1):
        for later in range(1, 30, 3):
            run_story(story, {number: "kill after", number + later: "kill before"})


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    story=st.sampled_from(list(STORIES.values())),
    faults=st.dictionaries(st.integers(1, 120), st.sampled_from(FAULTS), max_size=6),
    then=st.lists(st.sampled_from((A, B, "boot", "upgrade")), max_size=3),
)
@example(STORIES["new release"], {40: "fail", 48: "fail", 78: "kill after"}, [A])
@example(STORIES["same release again"], {64: "fail", 77: "fail", 120: "fail"}, [B, A])
def test_any_history_ends_with_a_proven_release(story, faults, then):
    run_story(story, faults, then)
