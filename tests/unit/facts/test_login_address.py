"""The address of a login, by the shell's own variable."""

from __future__ import annotations

import subprocess

import pytest

from spark_deploy.hosts.peer_download import LoginAddress


@pytest.mark.parametrize(
    ("variable", "address"),
    [
        ("10.77.0.1 40312 10.77.0.11 22", "10.77.0.11"),
        ("fe80::1%eth0 40312 2001:db8::11 2222", "2001:db8::11"),
        ("", ""),
        ("10.77.0.1 40312", ""),
    ],
)
def test_the_host_s_own_address_of_the_login_is_read(variable: str, address: str) -> None:
    fact = LoginAddress()
    said = subprocess.run(
        ["sh", "-c", fact.command()],
        env={"SSH_CONNECTION": variable} if variable else {},
        capture_output=True,
        text=True,
        check=True,
    )
    assert fact.process(said.stdout.splitlines()) == address
