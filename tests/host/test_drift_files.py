"""Each file that we own drifts alone: two minutes, so not in the gate; see test_drift.py."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from tests.host.conftest import Fleet
from tests.host.test_drift import FILE_CHANGES, Owned, manifest
from tests.labkit import Guest


def test_one_changed_file_is_one_repaired_file(fleet: Fleet) -> None:
    fleet.settle()
    files = [entry for entry in manifest(fleet.site, fleet.guests[0]) if entry["kind"] == "file"]
    # The content is changed on one host and the mode of the same file on the other.
    for group in one_by_one(files):
        names = [entry["name"] for entry in group]
        before = {guest.name: stamps(guest) for guest in fleet.guests}
        for guest, change in zip(fleet.guests, ("content", "mode"), strict=True):
            quoted = " ".join(shlex.quote(name) for name in names)
            guest.run(FILE_CHANGES[change].format(names=quoted))

        run = fleet.site.deploy()

        for guest in fleet.guests:
            assert run.changed_on(guest.name) == [group[0]["operation"]], names
            after = stamps(guest)
            rewritten = {name for name in after if after[name] != before[guest.name].get(name)}
            assert rewritten == set(names)


def one_by_one(files: Iterable[Owned]) -> Iterator[list[Owned]]:
    """Yield single files; the many modules of the host tools in a few heaps, each in one."""
    modules = []
    for entry in files:
        if entry["name"].endswith(".py"):
            modules.append(entry)
        else:
            yield [entry]
    heaps = 5
    for first in range(heaps):
        yield modules[first::heaps]


def stamps(guest: Guest) -> dict[str, str]:
    """Return what a rewritten file has anew: inode and times, of everything in our folders."""
    out = guest.run(
        "find /etc/spark /etc/systemd /etc/apt /etc/sysusers.d /usr/local -type f ! -name '*.pyc' "
        "-printf '%p %i %T@\\n'"
    )
    return dict(line.split(" ", 1) for line in out.splitlines())
