"""The fleet of all lab tests: two new hosts, the second as a Spark comes out of the box."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.host.gateway_host import LOOPBACK, NAME, SLOW, GatewayHost
from tests.labkit import Guest, Site, guest_named, lab
from tests.runs import Run

Completed = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Bare:
    """Observations before the first deploy: doctor's output, created files, and a dry run."""

    doctor_first: Completed
    doctor_both: Completed
    new_files: str
    dry: Run


@dataclass
class Fleet:
    site: Site
    guests: list[Guest]
    bare: Bare
    first: Run

    def settle(self, only: Guest | None = None, **choices: object) -> Run:
        """Deploy the usual settings with these choices, whatever earlier tests chose."""
        self.site.choices.clear()
        self.site.choose(**{**USUAL, **choices})
        return self.site.deploy(*(["--limit", only.name] if only else [])).assert_succeeded()


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
    site.bootstrap(SECOND).assert_succeeded()
    bare = Bare(*doctor, site.deploy(dry=True))
    first = site.deploy().assert_succeeded()
    return Fleet(site, [guest_named(name) for name in site.hosts], bare, first)


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
    site = Site(tmp_path_factory.mktemp("gateway"), hosts=[NAME])
    host = GatewayHost(site, guest_named(NAME))
    site.choose(model="lab-stub", profile="v2", engine={"environment": SLOW})
    host.deploy().assert_succeeded()
    return host


@pytest.fixture
def close_gateway_afterwards(gateway: GatewayHost) -> Iterator[None]:
    yield
    gateway.deploy().assert_succeeded()
    assert gateway.listening() == LOOPBACK
