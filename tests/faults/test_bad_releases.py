import re

import pytest

from tests.faults.bad_releases import DEPLOYED
from tests.faults.trial import evidence, forget_other_proofs

pytestmark = pytest.mark.gate

# The engine's error as a reason, without the log's prefix.
OUT_OF_MEMORY = r"; ValueError: Free memory on device"


@pytest.fixture(scope="module")
def guest(fleet):
    fleet.settle(fleet.guests[0])
    return fleet.guests[0]


@pytest.mark.parametrize("case", DEPLOYED)
def test_failed_deploy_leaves_only_the_old_release_proven(fleet, guest, case):
    before, release, argv = guest.serving(), guest.release(), guest.argv()
    forget_other_proofs(guest, release)
    proofs = evidence(guest)

    fleet.site.choose(**DEPLOYED[case].choices or {})
    run = fleet.site.deploy("--limit", guest.name)

    assert run.exit_code != 0
    assert f"rolled-back in phase {DEPLOYED[case].phase}" in run.stderr
    assert f"{guest.name} still serves " in run.stderr
    if case == "out of memory at load":
        assert re.search(OUT_OF_MEMORY, run.stderr), run.stderr[-4000:]
    assert guest.serving() == before
    assert guest.argv() == argv
    assert guest.answers()
    assert evidence(guest) == proofs
    assert proofs["proven"] == [release]
    assert proofs["boots"] == before
    fleet.settle(guest).assert_unchanged()
    assert guest.serving() == before
