"""A pull together with another choice: jobs, a rollout and a way back over yesterday's records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests import release_before
from tests.clients import Seen, clients
from tests.labkit import CHECKOUT, SPARE, Site, guest_named, lab
from tests.runs import Run

NAME = SPARE[1]
CAPITAL = "What is the capital of France?"
TREES = "find /srv/spark/models -name receipt.json"


@dataclass(frozen=True)
class Changed:
    """A host of the release before, after this one's first run brought a tree of its own."""

    host: release_before.Upgraded
    first: str
    trees: set[str]
    dry: Run
    run: Run
    seen: list[Seen]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    root = tmp_path_factory.mktemp("site")
    earlier = release_before.unpacked(tmp_path_factory.mktemp("release-before"))
    lab("up", NAME, "--fresh", "--engine", "stub")
    link = root / "checkout"
    link.symlink_to(earlier)
    host = release_before.Upgraded(Site(root, hosts=[NAME], checkout=link), guest_named(NAME))
    host.site.choose(model="lab-stub", profile="v2")
    host.deploy()
    first, trees = host.guest.release(), set(host.guest.run(TREES).split())

    host.use(CHECKOUT)
    # Nobody has asked this host for that tree: the earlier tools are asked for an unknown job.
    host.site.choose(checkpoint={"layout": "full"})
    dry = host.deploy(dry=True)
    with clients(host.guest, host.guest.names()[0]) as seen:
        run = host.deploy()

    yield Changed(host, first, trees, dry, run, seen)
    lab("down", NAME)


def test_a_pull_with_another_tree_builds_it_and_rolls_over_to_it(changed: Changed) -> None:
    host = changed.host
    assert host.guest.release() != changed.first
    assert set(host.guest.run(TREES).split()) > changed.trees
    assert changed.run.changed == changed.dry.predicted
    assert f"Serve | Serve the release on {NAME}" in changed.run.changed
    assert host.proven()
    assert host.guest.boots() == host.guest.serving()
    assert host.guest.answers(CAPITAL, "Paris")
    assert {one.kind for one in changed.seen} == {"right", "refused"}
    host.deploy().must_have_changed_nothing()


def test_the_way_back_leads_to_what_the_release_before_deployed(changed: Changed) -> None:
    host = changed.host

    back = host.deploy("deploys/rollback.py")

    assert back.changed == [f"Rollback | Go back on {NAME}"]
    assert host.guest.release() == changed.first
    assert host.proven()
