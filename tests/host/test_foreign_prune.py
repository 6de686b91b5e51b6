"""After a foreign `docker prune` while no engine runs, the next deploy repairs everything."""

from __future__ import annotations

import pytest

from tests.host.gateway_host import NAME, GatewayHost

IMAGE = "Image | Prepare the engine image"
SERVE = f"Serve | Serve the release on {NAME}"


@pytest.fixture
def pruned_unit(gateway: GatewayHost) -> str:
    unit = gateway.guest.serving()[0]
    gateway.guest.run(f"systemctl stop {unit} && docker system prune -af --volumes")
    assert gateway.guest.run("docker images -q") == ""
    return unit


def test_next_deploy_restores_image_and_server(gateway: GatewayHost, pruned_unit: str) -> None:
    # Until then a start reports the missing image and does not pull it.
    start = f"systemctl start {pruned_unit}; journalctl -u {pruned_unit} -n 30 -o cat"
    refused = gateway.guest.run(start, check=False)
    assert "not on this host; fix: " in refused
    assert gateway.guest.run("docker images -q") == ""

    repaired = gateway.site.deploy()
    assert repaired.exit_code == 0, repaired.stderr[-3000:]
    assert set(repaired.changed) == {IMAGE, "Serve | Wait for all jobs", SERVE}
    assert gateway.guest.serving() == [pruned_unit]
    assert gateway.guest.answers()
    gateway.site.deploy().assert_unchanged()
