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
    # Until then a start fails and does not pull the image.
    gateway.guest.run(f"systemctl start {pruned_unit}", check=False)
    assert gateway.guest.run("docker images -q") == ""

    repaired = gateway.site.deploy().assert_succeeded()
    assert set(repaired.changed) == {IMAGE, "Serve | Wait for all jobs", SERVE}
    assert gateway.guest.serving() == [pruned_unit]
    assert gateway.guest.answers()
    gateway.site.deploy().assert_unchanged()
