"""An engine that misbehaves never becomes "proven", and the old release serves on."""

from __future__ import annotations

import pytest

from tests.host.conftest import Fleet

# One of each kind, through the whole deploy; tests/unit/serve holds every fault of the stub engine
# (lab/stub_engine) against the check that must catch it.
FAULTS = ["garbage", "wrong-name", "low-acceptance", "wedge", "crash-at-start"]


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_refused_and_the_old_release_answers(fleet: Fleet, fault: str) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    before, argv = guest.serving(), guest.argv()

    fleet.site.choose(engine={"environment": {"STUB_FAULT": fault}}, check={"timeout_s": 60})
    run = fleet.site.deploy("--limit", guest.name)

    assert run.exit_code != 0
    assert "rolled-back" in run.stderr or "failed" in run.stderr
    assert guest.serving() == before
    assert guest.boots() == before
    assert guest.argv() == argv
    status, body = guest.ask("What is the capital of France?")
    assert (status, "Paris" in str(body)) == (200, True)
    candidates = guest.run("grep -l true /var/lib/spark/proofs/*.json || :").split()
    assert len(candidates) >= 1
    # Taking the choice back is all it needs.
    fleet.settle()
    assert fleet.site.deploy("--limit", guest.name).changed == []
