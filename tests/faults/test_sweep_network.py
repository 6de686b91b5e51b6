"""Every way in which hub, registry and package repository fail: one line, nothing lost, healed.

Each guest reaches the lab's servers through ``hostile.py``, which misbehaves towards that guest
alone. What the fetcher makes of it without a host is in ``tests/unit/checkpoint``.
"""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from spark_contract.fetching import PULL_STALL_S

from tests.faults.hostile import HOST, WAYS, Fault, Ways
from tests.faults.killing import QUESTION, Place
from tests.faults.sweep import GUESTS, Sweep, all_well, side_by_side
from tests.labkit import lab
from tests.runs import Run

ABOUT = {
    "hub": "model files have to be fetched; the old release serves",
    "registry": "the engine's image has to be pulled; nothing serves without it",
    "packages": "a package of the vendor's repository has to be installed; the old release serves",
}
COUNTED = (
    "Permanent failures of the servers that a host asks. The owner's line is the deploy's own. "
    "After each the server is well again, and the next deploy goes well without any help."
)
# Two attempts with a short pause: a case need not wait through all of them.
HASTY = {"downloads": {"tries": 2, "retry_pause_s": 0.2}}
STATUSES = ("401", "403", "404", "429", "500", "502", "503")
LIMIT_S = 240  # of a deploy; what an owner would wait for a word
BODIES = ("truncated", "reset", "stall", "wrong bytes")
WHOLE = ("no answer", "reset before", "redirect loop", "login page")


@dataclass(frozen=True)
class Service:
    """What makes a host ask a server, what of its answers goes wrong, and what stays up."""

    need: str
    match: str
    kinds: tuple[str, ...]
    body: str = ".*"  # the large answers, for faults in the middle of one
    serves_on: bool = True


SERVICES = {
    "hub": Service(
        "find /srv/spark/sources -mindepth 1 -delete",
        ".*",
        (*STATUSES, *WHOLE, *BODIES, "expired link"),
        r"^/blobs/",
    ),
    "registry": Service(
        "systemctl stop 'spark-serve@*'; docker images -q '*/lab/stub-engine' | sort -u "
        "| xargs docker rmi -f",
        "^/v2/",
        (*STATUSES, *WHOLE, *BODIES),
        "/blobs/",
        serves_on=False,
    ),
    "packages": Service(
        "apt-get -qq -y purge nvidia-container-toolkit >/dev/null 2>&1; apt-get clean; "
        "rm -rf /var/lib/apt/lists/*",
        "^/vendor/",
        ("403", "404", "503", *WHOLE, *BODIES, "badly signed", "stale"),
        r"\.deb$",
    ),
}
# Faults of one kind of answer only.
OF = {
    ("hub", "expired link"): Fault("403", r"^/blobs/"),
    ("packages", "badly signed"): Fault("wrong bytes", r"(InRelease|Release)$"),
    ("packages", "stale"): Fault("404", r"\.deb$"),
}


def fault_of(service: str, kind: str) -> Fault:
    about = SERVICES[service]
    given = OF.get((service, kind))
    return given or Fault(kind, about.body if kind in BODIES else about.match)


@pytest.fixture(scope="module")
def ways() -> Iterator[Ways]:
    lab("up", *GUESTS, "--engine", "stub")  # the address to listen on is the lab's
    made = Ways()
    yield made
    made.close()


@pytest.fixture(scope="module")
def places(ways: Ways, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Place]]:
    made = [Place.on(name, tmp_path_factory.mktemp(name), {}) for name in GUESTS]
    for place in made:
        place.begins_anew()
        through_the_ways(place)
        place.choose(**HASTY)
        place.deploys()
    yield made
    for name in GUESTS:
        lab("down", name)


def through_the_ways(place: Place) -> None:
    """Have a site know the lab's servers by the addresses of :class:`Ways`."""
    inventory = place.site.root / "inventory/lab.py"
    text, read = inventory.read_text(), '_state.read_text(encoding="utf-8")'
    assert text.count(read) == 1
    other = "".join(f'.replace("{HOST}:{a}", "{HOST}:{b}")' for a, b in WAYS.items())
    inventory.write_text(text.replace(read, read + other))


def fails_and_heals(ways: Ways, service: str, place: Place, kind: str) -> tuple[str, str]:
    """Deploy while a server misbehaves, and again when it is well."""
    about, guest = SERVICES[service], place.guest
    guest.run(about.need, timeout_s=200)
    before = guest.serving()
    with ways.broken(guest.ip, fault_of(service, kind)):
        began = time.monotonic()
        waits = service == "registry" and kind in ("stall", "no answer")
        limit_s = LIMIT_S + PULL_STALL_S * waits
        run = place.site.deploy(timeout_s=limit_s)
        waited_s = time.monotonic() - began
        asked = len(ways.asked[guest.ip])
    assert asked, "nobody asked the server that misbehaves"
    assert run.exit_code != 0, "the deploy went well"
    assert run.exit_code != -signal.SIGKILL, f"the deploy did not end within {limit_s:.0f} s"
    assert "Traceback" not in run.stderr, run.stderr[-3000:]
    if about.serves_on:
        assert before
        assert guest.serving() == before
        assert guest.answers(*QUESTION)
    saw = line_of(run)
    place.deploys()
    place.site.deploy().must_have_changed_nothing()
    assert guest.answers(*QUESTION)
    on = "the old release served on" if about.serves_on else "nothing served"
    return (
        saw,
        f"{on}; said after {waited_s:.0f} s; next run finished, the one after changed nothing",
    )


def line_of(run: Run) -> str:
    """Return the one line that says what went wrong, without the host's name and progress."""
    return line_of_text(run.stderr)


def line_of_text(said: str) -> str:
    """Return the line that names the trouble: with its fix, as an error, or above its fix."""
    lines = [re.sub(r"^\s*\[lab-\d+\] *", "", line).strip() for line in said.splitlines()]
    own = [line for line in lines if "; fix: " in line or line.startswith("error: ")]
    above = [line for line, after in itertools.pairwise(lines) if after.startswith("fix: ")]
    found = own or above
    assert found, f"nothing was said:\n{said[-3000:]}"
    # What stands below which address is the lab's own.
    return re.sub(r"https?://\S*/|@sha256:\w+", "", found[0].removeprefix("error: "))[:300]


@pytest.mark.parametrize("service", list(SERVICES))
def test_a_server_that_fails_costs_a_line_and_the_next_run_heals(
    ways: Ways, places: list[Place], service: str
) -> None:
    sweep = Sweep("network")
    cases = {f"{service}: {kind}": kind for kind in SERVICES[service].kinds}
    side_by_side(
        places,
        sweep.open_cases(service, cases),
        lambda place, case: sweep.tried(
            service, case, partial(fails_and_heals, ways, service, place, cases[case])
        ),
    )
    listed = [f"{name}: {kind}" for name, about in SERVICES.items() for kind in about.kinds]
    sweep.write("Servers that fail", ABOUT, places[0].guest, COUNTED, listed=listed)
    all_well(row for row in sweep.rows() if row.group == service)
