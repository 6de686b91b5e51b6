"""A host that the release before deployed is taken over by one rollout, with a way back.

What was on the host then is written by that release's own code, so its records are real ones.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import release_before
from tests.clients import Seen, clients
from tests.labkit import CHECKOUT, SPARE, Site, guest_named, lab
from tests.runs import Run

pytestmark = pytest.mark.gate

NAME = SPARE[0]
CAPITAL = "What is the capital of France?"


@dataclass(frozen=True)
class Takeover:
    """What was on the host before and after the first run of this release, and that run."""

    host: release_before.Upgraded
    before: dict[str, object]
    after: dict[str, object]
    old_tools: str
    dry: Run
    run: Run
    seen: list[Seen]


def look(host: release_before.Upgraded) -> dict[str, object]:
    return {
        "release": host.guest.release(),
        "release.json": host.release_sha256(),
        "boots": host.guest.boots(),
        "names": host.guest.names(),
        "answer": host.guest.ask(CAPITAL)[1]["choices"],
        "proven": host.proven(),
    }


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_before.unpacked(tmp_path_factory.mktemp("release-before"))


@pytest.fixture(scope="module")
def takeover(tmp_path_factory: pytest.TempPathFactory, earlier: Path) -> Iterator[Takeover]:
    root = tmp_path_factory.mktemp("site")
    lab("up", NAME, "--fresh", "--engine", "stub")
    link = root / "checkout"
    link.symlink_to(earlier)
    host = release_before.Upgraded(Site(root, hosts=[NAME], checkout=link), guest_named(NAME))
    # Of all exposures the one whose watch may reload the gateway: it runs the earlier code on.
    host.site.choose(model="lab-stub", profile="v2", serve={"expose": "docker"})
    host.deploy()
    # A change and a way back too, so that there is one record of each kind.
    host.site.choose(profile="agent")
    host.deploy()
    host.site.choose(profile="v2")
    host.deploy()
    host.deploy().must_have_changed_nothing()
    before, old_tools = look(host), host.tools()

    host.use(CHECKOUT)
    dry = host.deploy(dry=True)
    with clients(host.guest, host.guest.names()[0]) as seen:
        run = host.deploy()

    yield Takeover(host, before, look(host), old_tools, dry, run, seen)
    lab("down", NAME)


def test_a_host_of_the_release_before_is_taken_over_by_one_rollout(takeover: Takeover) -> None:
    before, after, guest = takeover.before, takeover.after, takeover.host.guest
    assert before["proven"]
    assert after["proven"]
    assert takeover.host.tools() != takeover.old_tools
    assert takeover.run.changed == takeover.dry.predicted
    assert f"Serve | Serve the release on {NAME}" in takeover.run.changed
    assert after["release"] != before["release"]
    assert after["boots"] == guest.serving() == [f"spark-serve@{after['release']}.service"]
    assert after["names"] == before["names"]
    assert after["answer"] == before["answer"]
    # While nobody served, clients were told when to come back, and never anything wrong.
    assert {one.kind for one in takeover.seen} == {"right", "refused"}
    takeover.host.deploy().must_have_changed_nothing()


def test_a_clone_without_the_release_before_says_so(tmp_path: Path) -> None:
    shallow = tmp_path / "clone"
    words = ["git", "clone", "-q", "--depth", "1", f"file://{CHECKOUT}", str(shallow)]
    subprocess.run(words, check=True, capture_output=True)

    with pytest.raises(AssertionError, match="fix: git fetch --unshallow"):
        release_before.unpacked(tmp_path / "tree", clone=shallow)


def test_the_way_back_serves_what_the_release_before_wrote(takeover: Takeover) -> None:
    host, first = takeover.host, takeover.before["release"]

    back = host.deploy("deploys/rollback.py")

    assert back.changed == [f"Rollback | Go back on {NAME}"]
    assert host.guest.release() == first
    assert host.release_sha256() == takeover.before["release.json"]
    assert host.guest.boots() == host.guest.serving()
    assert host.proven()
    assert host.guest.answers(CAPITAL, "Paris")
    assert host.watched_by() == host.tools() != takeover.old_tools

    assert f"Serve | Serve the release on {NAME}" in host.deploy().changed
    assert host.guest.release() == takeover.after["release"]
    host.deploy().must_have_changed_nothing()
