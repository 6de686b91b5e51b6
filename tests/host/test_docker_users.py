"""Listed users may use Docker without sudo from their next login on."""

from __future__ import annotations

import subprocess

from tests.host.prepared_host import Prepared, prepared
from tests.labkit import Guest, info

__all__ = ["prepared"]


def can_use_docker(guest: Guest) -> bool:
    done = subprocess.run([*guest.login(), "docker ps"], capture_output=True, check=False)
    return done.returncode == 0


def test_listed_user_can_use_docker_from_next_login(prepared: Prepared) -> None:
    guest = prepared.guest
    assert guest.run("getent group docker").endswith(":")
    assert not can_use_docker(guest)
    prepared.site.choose(docker={"users": [info()["ssh"]["user"]]})

    assert prepared.run().changed == ["Docker | Add users to the docker group"]

    assert can_use_docker(guest)
    prepared.run().assert_unchanged()
