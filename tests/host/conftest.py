"""The fleet of all lab tests: two new hosts, the second as a Spark comes out of the box."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.host.gateway_host import LOOPBACK, NAME, SLOW, GatewayHost
from tests.labkit import Guest, Site, guest_named, info, lab
from tests.runs import Run


@dataclass(frozen=True)
class Bare:
    doctor_first: subprocess.CompletedProcess[str]
    doctor_both: subprocess.CompletedProcess[str]
    new_files: str
    dry: Run


@dataclass
class Fleet:
    site: Site
    guests: list[Guest]
    bare: Bare
    first: Run

    def settle(self, only: Guest | None = None, **choices: object) -> Run:
        self.site.choices.clear()
        self.site.choose(**{**USUAL, **choices})
        run = self.site.deploy(*(["--limit", only.name] if only else []))
        if run.exit_code != 0:
            raise AssertionError(f"cannot settle: {run.failed}\n{run.stderr[-4000:]}")
        return run


USUAL = {"model": "lab-stub", "profile": "v2"}
# Other guests allow a second test run at the same time.
FIRST, SECOND = os.environ.get("SPARK_FLEET_GUESTS", "lab-1 lab-2").split()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    lab("up", FIRST, SECOND, "--fresh", "--bootstrap-guest", SECOND, "--engine", "stub")
    root: Path = tmp_path_factory.mktemp("site")
    site = Site(root, hosts=[FIRST, SECOND])
    site.choose(**USUAL)
    doctor = run_doctor_on_bare_hosts(site)
    bootstrapped = site.bootstrap(SECOND)
    assert bootstrapped.exit_code == 0, bootstrapped.stderr[-4000:]
    bare = Bare(*doctor, site.deploy(dry=True))
    first = site.deploy()
    assert first.exit_code == 0, f"{first.failed}\n{first.stderr[-6000:]}"
    guests = [Guest(guest["name"], guest["ip"]) for guest in info()["guests"]]
    return Fleet(site, [guest for guest in guests if guest.name in site.hosts], bare, first)


Completed = subprocess.CompletedProcess[str]


def run_doctor_on_bare_hosts(site: Site) -> tuple[Completed, Completed, str]:
    first = guest_named(FIRST)
    first.run("touch /run/before")
    alone = site.cli("doctor", "--limit", FIRST)
    both = site.cli("doctor")
    new_files = first.run(
        "find /etc /usr /opt /srv /root /home /var -xdev -type f -newer /run/before "
        "! -path '/var/log/*' ! -path '/var/lib/systemd/*' ! -path '/var/lib/sudo/*'"
    )
    return alone, both, new_files


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> GatewayHost:
    lab("up", NAME, "--fresh", "--engine", "stub")
    guest = guest_named(NAME)
    site = Site(tmp_path_factory.mktemp("gateway"), hosts=[NAME])
    host = GatewayHost(site, guest)
    site.choose(model="lab-stub", profile="v2", engine={"environment": SLOW})
    first = host.deploy()
    assert first.exit_code == 0, first.stderr[-4000:]
    return host


@pytest.fixture
def close_gateway_afterwards(gateway: GatewayHost) -> Iterator[None]:
    yield
    assert gateway.deploy().exit_code == 0
    assert gateway.listening() == LOOPBACK
