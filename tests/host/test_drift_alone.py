"""Each thing that we own drifts alone: two minutes, so not in the gate; see test_drift.py.

Each run repairs one change on the one host and another on the other.
"""

from __future__ import annotations

from itertools import zip_longest

from tests.host.conftest import Fleet
from tests.host.test_drift import Owned, manifest
from tests.labkit import Guest

# How each kind of thing is changed. A kind that is not here fails the test.
CHANGES = {
    "state": "rm {name}",
    "keys": "echo '{{}}' > {name}",
    "link": "ln -sfn /nowhere {name}",
    "directory": "chmod 700 {name}; chgrp nogroup {name}",
    "package": "dpkg --force-depends --remove {name}",
    "masked": "systemctl unmask {name}",
    "user": "sed -i '/^{name}:/d' /etc/passwd",  # userdel refuses while it runs something
    "image": "docker rmi -f {name}",
    "tree": "rm $(ls -d {name}/*.safetensors | head -n 1)",
    "active": "systemctl stop {name}",
    "enabled": "systemctl disable {name}",
}
# What the host itself says of it, before, in between and after: no word of the code under test.
LOOKS = {
    "state": "stat -c '%a %U:%G' {name} && test -s {name} && echo something",
    "keys": "cat {name}",
    "link": "readlink {name}",
    "directory": "stat -c '%a %U:%G' {name}",
    "package": "dpkg-query -W -f '${{db:Status-Abbrev}}' {name}",
    "masked": "systemctl is-enabled {name}",
    "user": "getent passwd {name} | cut -d: -f 1,6,7 && id -Gn {name}",
    "image": "docker image inspect -f '{{{{.Id}}}}' {name}",
    "tree": "cd {name} && sha256sum $(ls | grep -v '^receipt.json$')",
    "active": "systemctl is-active {name}",
    "enabled": "systemctl is-enabled {name}",
}
NEVER = {
    "python3",  # without it neither the host tools nor apt's own scripts run: nothing could repair
    "nginx-light",  # an empty package in Debian 12, which its nginx provides as well
    "/var/lib/systemd/timers/stamp-spark-daily.timer",  # systemd's own; it writes it when it fires
}

WAIT = "Prepare | Wait for all jobs"
START = "Serve | Start new services"
PEERS = " peer downloads"  # a host lends files that the other lacks: no repair of a drift
# What else has to be done again after a change; everything else is the owner's work alone.
FURTHER = {
    "tree": {WAIT},
    "image": {WAIT},
    "docker.io": {START},  # no engine outlives its daemon's program
}


def look(owned: Owned) -> str:
    return f"( {LOOKS[owned['kind']].format(name=owned['name'])} ) 2>/dev/null || :"


def change(guest: Guest, owned: Owned) -> str:
    """Change one thing; return what the host said of it before, once it said otherwise."""
    done = CHANGES[owned["kind"]].format(name=owned["name"])
    told = guest.run(f"{look(owned)}; echo ---; ( {done} ) >&2 && echo --- && {look(owned)}")
    before, between = (told + "\n").split("---\n", 2)[::2]
    assert before.strip()
    assert before != between, owned
    return before.strip()


def expected(owned: Owned) -> set[str]:
    further = FURTHER.get(owned["kind"], set()) | FURTHER.get(owned["name"], set())
    stopped = owned["kind"] == "active" and owned["name"].startswith("spark-serve@")
    return {START if stopped else owned["operation"], *further}


def test_each_thing_we_own_is_repaired_by_the_operation_that_owns_it(fleet: Fleet) -> None:
    fleet.settle()
    one, two = fleet.guests
    owned = {guest.name: manifest(fleet.site, guest) for guest in fleet.guests}
    assert {entry["kind"] for entry in owned[one.name]} - {"file"} == set(CHANGES) == set(LOOKS)
    things = [
        [entry for entry in owned[guest.name]
         if entry["kind"] != "file" and entry["name"] not in NEVER]
        for guest in fleet.guests
    ]  # fmt: skip
    wrong = []
    for pair in zip_longest(things[0][::2], things[1][1::2]):
        changed = [(guest, entry) for guest, entry in zip((one, two), pair, strict=True) if entry]
        right = [change(guest, entry) for guest, entry in changed]
        run = fleet.site.deploy()
        for (guest, entry), before in zip(changed, right, strict=True):
            repaired = [name for name in run.changed_on(guest.name) if not name.endswith(PEERS)]
            if run.exit_code or set(repaired) != expected(entry):
                wrong.append(f"{entry['name']}: {repaired}\n{run.stderr}")
            elif (now := guest.run(look(entry)).strip()) != before:
                wrong.append(f"{entry['name']}: the host says {now!r}, before {before!r}")
    assert not wrong, "\n\n".join(wrong)
    fleet.site.deploy().must_have_changed_nothing()
