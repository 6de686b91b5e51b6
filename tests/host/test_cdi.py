import pytest

from tests.host.gateway_host import NAME
from tests.host.test_upgrades import CDI, GPU_PROOF, NEW, OLD, assert_changed_only, set_driver

CONFIG = "/etc/nvidia-container-runtime/config.toml"
SERVE = f"Serve | Serve the release on {NAME}"


@pytest.fixture
def forced(gateway):
    gateway.deploy()
    gateway.guest.run(f"sed -i 's/^mode = .*/mode = \"cdi\"/' {CONFIG}")
    yield gateway
    gateway.guest.run(f"sed -i 's/^mode = .*/mode = \"auto\"/' {CONFIG}; rm -rf /etc/cdi")


def test_deploy_generates_cdi_specification_and_updates_it_with_the_driver(forced):
    guest, unit = forced.guest, forced.guest.serving()[0]
    # No container starts without a specification.
    image = guest.run("docker images -q | head -n 1")
    output = guest.run(f"docker run --rm --runtime=nvidia {image} nvidia-smi -L 2>&1", check=False)
    assert "unresolvable CDI devices nvidia.com/gpu=all" in output

    assert_changed_only(forced.site.deploy(), CDI, GPU_PROOF)
    assert f"libcuda.so.{OLD}" in guest.run("cat /etc/cdi/nvidia.yaml")
    assert_changed_only(forced.site.deploy())
    guest.run(f"systemctl restart {unit}")
    assert guest.answers()

    engine = forced.engine()
    set_driver(guest, OLD, NEW)
    try:
        again = forced.site.deploy()
        assert_changed_only(again, CDI, GPU_PROOF, SERVE)
        assert f"libcuda.so.{NEW}" in guest.run("cat /etc/cdi/nvidia.yaml")
        assert forced.engine() == engine
        guest.run(f"systemctl restart {unit}")
        assert guest.answers()
    finally:
        set_driver(guest, NEW, OLD)


def test_boot_with_a_new_driver_updates_the_cdi_specification(forced):
    guest, unit = forced.guest, forced.guest.serving()[0]
    forced.site.deploy().assert_succeeded()
    set_driver(guest, OLD, NEW)
    try:
        guest.power_cut()
        guest.wait(f"systemctl is-active {unit}", seconds=90)
        assert guest.answers()
        assert f"libcuda.so.{NEW}" in guest.run("cat /etc/cdi/nvidia.yaml")
        assert_changed_only(forced.site.deploy(), GPU_PROOF, SERVE)
    finally:
        set_driver(guest, NEW, OLD)
