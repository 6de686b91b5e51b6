import gevent
import pytest

from spark_deploy.hosts import facts
from spark_deploy.hosts.facts import HostFact, expect_fact, prefetch, read_fact
from tests.unit.operations.fake_host import FakeHost, local_shell, on


class Output(HostFact[list[str]]):
    default = list

    def command(self, script):
        return script

    def process(self, output):
        return list(output)


class Slow(Output):
    """A fact with a separate command."""


class Unterminated(Output):
    """A fact without a final newline."""


class Failing(Output):
    """A fact with a failing script."""


SCRIPTS = {
    Output: ("echo a; echo; exit 0", ["a", ""]),
    Slow: ("echo b", ["b"]),
    Unterminated: ("printf c", ["c"]),
    Failing: ("echo half; exit 1", []),
}


class CountingHost(FakeHost):
    """Runs scripts, and notes the most at once."""

    def __init__(self):
        super().__init__({}, shell=self.count)
        self.running = self.most_at_once = 0

    def count(self, script):
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        gevent.sleep(0.01)
        self.running -= 1
        return local_shell(script)


def read(kind):
    return read_fact(kind, script=SCRIPTS[kind][0])


@pytest.fixture
def host():
    host = CountingHost()
    with on(host):
        for kind, (script, _) in SCRIPTS.items():
            expect_fact(kind, lambda script=script: {"script": script}, slow=kind is Slow)
        yield host


def test_prefetch_reads_expected_facts_in_parallel_and_only_once(host):
    prefetch()
    assert (len(host.commands), host.most_at_once) == (2, 2)
    for kind in (Output, Slow, Unterminated):
        assert read(kind) == SCRIPTS[kind][1]
    prefetch()
    assert (len(host.commands), host.fact_reads) == (2, 0)


def test_facts_that_failed_or_have_different_arguments_are_read_again(host):
    prefetch()
    read(Failing)
    read_fact(Output, script="echo another")
    assert host.fact_reads == 2


def test_facts_are_read_again_after_a_lost_connection(host):
    host.shell = lambda script: EOFError()
    prefetch()
    read(Output)
    assert host.fact_reads == 1


def test_cached_fact_expires_with_age_or_after_any_command(host, monkeypatch):
    prefetch()
    monkeypatch.setattr(facts, "MAX_AGE_S", -1)
    read(Output)
    assert host.fact_reads == 1
    monkeypatch.undo()
    monkeypatch.setattr(facts, "commands_executed", lambda on: 1)
    read(Slow)
    assert host.fact_reads == 2


def test_dry_run_prefetches_nothing():
    host = CountingHost()
    with on(host, executing=False):
        expect_fact(Output, lambda: {"script": "echo a"})
        prefetch()
    assert host.commands == []
