"""One lab for all lab tests: two fresh hosts, one of them as new as a Spark out of the box."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.host.exposure import HERE, NAME, SLOW, Place
from tests.labkit import Guest, Site, guest_named, info, lab
from tests.runs import Run


@dataclass(frozen=True)
class Bare:
    """What looking at the hosts said before the first run, and whether it left a trace."""

    doctor_first: subprocess.CompletedProcess[str]
    doctor_both: subprocess.CompletedProcess[str]
    new_files: str
    dry: Run


@dataclass
class Fleet:
    """The hosts of the lab, the user's repository, and the first run that set them up."""

    site: Site
    guests: list[Guest]
    bare: Bare
    first: Run

    def settle(self, only: Guest | None = None, **choices: object) -> Run:
        """Bring every host, or one, to the usual choices; each test begins from there."""
        self.site.choices.clear()
        self.site.choose(**{**USUAL, **choices})
        run = self.site.deploy(*(["--limit", only.name] if only else []))
        if run.exit_code != 0:
            raise AssertionError(f"cannot settle: {run.failed}\n{run.stderr[-4000:]}")
        return run


USUAL = {"model": "lab-stub", "profile": "v2"}
# Two guests; another pair lets a second run stand beside the first.
FIRST, SECOND = os.environ.get("SPARK_FLEET_GUESTS", "lab-1 lab-2").split()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    lab("up", FIRST, SECOND, "--fresh", "--bootstrap-guest", SECOND, "--engine", "stub")
    root: Path = tmp_path_factory.mktemp("site")
    site = Site(root, hosts=[FIRST, SECOND])
    site.choose(**USUAL)
    looks = look_at_bare_hosts(site)
    bootstrapped = site.bootstrap(SECOND)
    assert bootstrapped.exit_code == 0, bootstrapped.stderr[-4000:]
    bare = Bare(*looks, site.deploy(dry=True))
    first = site.deploy()
    assert first.exit_code == 0, f"{first.failed}\n{first.stderr[-6000:]}"
    guests = [Guest(guest["name"], guest["ip"]) for guest in info()["guests"]]
    return Fleet(site, [guest for guest in guests if guest.name in site.hosts], bare, first)


Looked = subprocess.CompletedProcess[str]


def look_at_bare_hosts(site: Site) -> tuple[Looked, Looked, str]:
    """Ask doctor about hosts on which nothing of ours is, and look for what that wrote."""
    first = guest_named(FIRST)
    first.run("touch /run/before")
    one = site.look("doctor", "--limit", FIRST)
    both = site.look("doctor")
    found = first.run(
        "find /etc /usr /opt /srv /root /home /var -xdev -type f -newer /run/before "
        "! -path '/var/log/*' ! -path '/var/lib/systemd/*' ! -path '/var/lib/sudo/*'"
    )
    return one, both, found


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    lab("up", NAME, "--fresh", "--engine", "stub")
    guest = guest_named(NAME)
    site = Site(tmp_path_factory.mktemp("gateway"), hosts=[NAME])
    made = Place(site, guest)
    site.choose(model="lab-stub", profile="v2", engine={"environment": SLOW})
    first = made.deploy()
    assert first.exit_code == 0, first.stderr[-4000:]
    return made


@pytest.fixture
def narrow_again(place: Place) -> Iterator[None]:
    """Leave the gateway to this host alone, and see that nothing else listens."""
    yield
    assert place.deploy().exit_code == 0
    assert place.listening() == HERE
