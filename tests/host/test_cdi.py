"""A host whose toolkit is forced to CDI: a specification is made, kept with the driver, and used.

Docker 20.10 has no CDI of its own, so the toolkit's runtime (the lab's stand-in, as strict as the
real one about specifications) resolves it. The `--device` way of docker 28 and 29 is tested on what
those print (tests/unit/operations/test_gpu_access.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host.exposure import NAME, QUESTION, Place
from tests.host.test_upgrades import CDI, GPU_PROOF, NEW, OLD, only, upgraded
from tests.labkit import lab

CONFIG = "/etc/nvidia-container-runtime/config.toml"
SERVE = f"Serve | Serve the release on {NAME}"


@pytest.fixture
def forced(place: Place) -> Iterator[Place]:
    """Force the toolkit to CDI, as `nvidia-ctk config --set nvidia-container-runtime.mode=cdi`."""
    place.deploy()
    place.guest.run(f"sed -i 's/^mode = .*/mode = \"cdi\"/' {CONFIG}")
    yield place
    place.guest.run(f"sed -i 's/^mode = .*/mode = \"auto\"/' {CONFIG}; rm -rf /etc/cdi")


def test_a_specification_is_made_where_containers_need_one(forced: Place) -> None:
    guest, unit = forced.guest, forced.guest.serving()[0]
    # Without one no container starts here, so no engine either.
    image = guest.run("docker images -q | head -n 1")
    said = guest.run(f"docker run --rm --runtime=nvidia {image} nvidia-smi -L 2>&1", check=False)
    assert "unresolvable CDI devices nvidia.com/gpu=all" in said

    only(forced.site.deploy(), CDI, GPU_PROOF)
    assert f"libcuda.so.{OLD}" in guest.run("cat /etc/cdi/nvidia.yaml")
    only(forced.site.deploy())
    guest.run(f"systemctl restart {unit}")
    assert guest.ask(QUESTION)[0] == 200

    # A new driver makes the specification stale; the server that runs is not touched for it.
    engine = forced.engine()
    upgraded(guest, OLD, NEW)
    try:
        again = forced.site.deploy()
        only(again, CDI, GPU_PROOF, SERVE)
        assert f"/etc/cdi/nvidia.yaml is of driver {OLD}, {NEW} is loaded" in again.stderr
        assert f"libcuda.so.{NEW}" in guest.run("cat /etc/cdi/nvidia.yaml")
        assert forced.engine() == engine
        guest.run(f"systemctl restart {unit}")
        assert guest.ask(QUESTION)[0] == 200
    finally:
        upgraded(guest, NEW, OLD)


def test_a_boot_with_another_driver_brings_the_server_back_before_any_deploy(
    forced: Place,
) -> None:
    guest, unit = forced.guest, forced.guest.serving()[0]
    assert forced.site.deploy().exit_code == 0
    upgraded(guest, OLD, NEW)
    try:
        lab("break", "kill-guest", NAME)
        lab("up", NAME)

        guest.wait(f"systemctl is-active {unit}", seconds=90)
        assert guest.ask(QUESTION)[0] == 200
        assert f"libcuda.so.{NEW}" in guest.run("cat /etc/cdi/nvidia.yaml")
        log = guest.run(f"journalctl -b -u {unit} -o cat")
        assert f"is of driver {OLD}, {NEW} is loaded: regenerating it" in log
        # The container check and the full proof are the next deploy's.
        only(forced.site.deploy(), GPU_PROOF, SERVE)
    finally:
        upgraded(guest, NEW, OLD)


def test_the_engine_is_started_as_the_container_check_was(place: Place) -> None:
    proven = place.guest.json("cat /var/lib/spark/receipts/gpu-container.json")
    assert proven["docker_arguments"] == ["--runtime=nvidia"]
    name = place.guest.run("docker ps --filter label=spark.release --format '{{.Names}}'")
    assert place.guest.json(f"docker inspect {name}")[0]["HostConfig"]["Runtime"] == "nvidia"
