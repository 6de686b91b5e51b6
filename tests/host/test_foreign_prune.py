"""Somebody cleans up docker while no engine runs: the next deploy makes everything good."""

from __future__ import annotations

import pytest

from tests.host.exposure import NAME, QUESTION, Place

IMAGE = "Image | Prepare the engine image"
SERVE = f"Serve | Serve the release on {NAME}"


@pytest.fixture
def emptied(place: Place) -> str:
    """Stop the engine past its restarts and prune; return the unit that served."""
    unit = place.guest.serving()[0]
    place.guest.run(f"systemctl stop {unit} && docker system prune -af --volumes")
    assert place.guest.run("docker images -q") == ""
    return unit


def test_the_next_deploy_brings_image_and_server_back(place: Place, emptied: str) -> None:
    # Until then a start says what is missing, instead of pulling something by itself.
    refused = place.guest.run(f"systemctl start {emptied}; journalctl -u {emptied} -n 30 -o cat",
                              check=False)  # fmt: skip
    assert "not on this host; fix: run the deploy again" in refused
    assert place.guest.run("docker images -q") == ""

    repaired = place.site.deploy()
    assert repaired.exit_code == 0, repaired.stderr[-3000:]
    assert set(repaired.changed) == {IMAGE, "Serve | Wait for all jobs", SERVE}
    assert place.guest.serving() == [emptied]
    assert place.guest.ask(QUESTION)[0] == 200
    place.site.deploy().must_have_changed_nothing()
