"""An engine that misbehaves never becomes "proven", and the old release serves on.

What a user could choose, through the whole deploy; test_every_misbehaviour.py has the other faults.
"""

from __future__ import annotations

import re

import pytest

from tests.faults.plants import DEPLOYED
from tests.faults.trial import evidence, forget_other_proofs, name_of
from tests.host.conftest import Fleet
from tests.labkit import Guest

pytestmark = pytest.mark.gate

# The engine's own line under the host's name; the reason beside it only quotes it.
OUT_OF_MEMORY = r"\] +\(EngineCore pid=\d+\) ERROR ValueError: Free memory on device"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def settled(fleet: Fleet) -> Guest:
    fleet.settle(fleet.guests[0])
    return fleet.guests[0]


@pytest.mark.parametrize("plant", DEPLOYED)
def test_a_deploy_of_it_is_red_and_the_old_release_alone_is_proven(
    fleet: Fleet, settled: Guest, plant: str
) -> None:
    guest = settled
    [unit] = before = guest.serving()
    argv = guest.argv()
    forget_other_proofs(guest, name_of(unit))
    proofs = evidence(guest)

    fleet.site.choose(**DEPLOYED[plant].choices or {})
    run = fleet.site.deploy("--limit", guest.name)

    assert run.exit_code != 0
    assert f"rolled-back in phase {DEPLOYED[plant].phase}" in run.stderr
    assert f"now serving: {name_of(unit)}\n" in run.stderr
    if plant == "out of memory at load":
        assert re.search(OUT_OF_MEMORY, run.stderr), run.stderr[-4000:]
    assert guest.serving() == before
    assert guest.argv() == argv
    assert guest.answers(QUESTION, "Paris")
    assert evidence(guest) == proofs
    assert proofs["proven"] == [name_of(unit)]
    assert proofs["boots"] == before
    # Taking the choice back is all it needs: the host is what it was.
    fleet.settle(guest).must_have_changed_nothing()
    assert guest.serving() == before
