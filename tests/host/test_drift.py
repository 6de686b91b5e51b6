"""Whatever changes on a host, the next run repairs exactly that.

What we own is asked of `spark-deploy manifest`. Both hosts of the lab take part: each run repairs
one change on the one and another change on the other, and each host's operations are compared.
"""

from __future__ import annotations

import json
import shlex
from itertools import zip_longest
from typing import Any

from tests.host.conftest import Fleet
from tests.labkit import Guest, Site

Owned = dict[str, Any]

# How each kind of thing is changed. A kind that is not here fails the test.
CHANGES = {
    "state": "rm {name}",
    "keys": "echo '{{}}' > {name}",
    "link": "ln -sfn /nowhere {name}",
    "directory": "chmod 700 {name}; chown nobody {name}",
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
FILE_CHANGES = {
    "content": "sed -i '$a#x' {names}",
    "mode": "chmod 777 {names}",
    "owner": "chown nobody {names}",
    "existence": "rm {names}",
}
# Without it neither the host tools nor apt's own scripts run: no run could repair anything.
NEVER = {"python3"}

WAIT = "Serve | Wait until everything is prepared"
# What else has to be done again after a change; everything else is the owner's work alone.
FURTHER = {
    "tree": {WAIT},
    "image": {WAIT},
    "docker.io": {"Serve | Serve the release"},  # no engine outlives its daemon's program
}


def manifest(site: Site, guest: Guest) -> list[Owned]:
    """Ask the command that people use for everything we own on a host."""
    looked = site.look("manifest", "--limit", guest.name, "--json")
    assert looked.returncode == 0, looked.stderr
    found: list[Owned] = json.loads(looked.stdout)[guest.name]
    return found


def look(owned: Owned) -> str:
    return f"( {LOOKS[owned['kind']].format(name=owned['name'])} ) 2>/dev/null || :"


def change(guest: Guest, owned: Owned) -> str:
    """Change one thing; return what the host said of it before, once it said otherwise."""
    done = CHANGES[owned["kind"]].format(name=owned["name"])
    told = guest.run(f"{look(owned)}; echo ---; {done} >&2 && echo --- && {look(owned)}")
    before, between = (told + "\n").split("---\n", 2)[::2]
    assert before.strip()
    assert before != between, owned
    return before.strip()


def expected(owned: Owned, guest: Guest) -> set[str]:
    further = FURTHER.get(owned["kind"], set()) | FURTHER.get(owned["name"], set())
    serve = "Serve | Serve the release"
    return {owned["operation"]} | {
        f"{name} on {guest.name}" if name == serve else name for name in further
    }


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
            repaired = run.changed_on(guest.name)
            if run.exit_code or set(repaired) != expected(entry, guest):
                wrong.append(f"{entry['name']}: {repaired}\n{run.stderr}")
            elif (now := guest.run(look(entry)).strip()) != before:
                wrong.append(f"{entry['name']}: the host says {now!r}, before {before!r}")
    assert not wrong, "\n\n".join(wrong)
    assert fleet.site.deploy().changed == []


def test_all_files_at_once_get_their_content_mode_and_owner_back(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    files = [entry for entry in manifest(fleet.site, guest) if entry["kind"] == "file"]
    assert len(files) > 40
    names = " ".join(shlex.quote(entry["name"]) for entry in files)
    look = f"sha256sum {names}; stat -c '%a %U:%G %n' {names}"
    right = guest.run(look)
    modes = dict(reversed(line.split(" ", 1)) for line in right.splitlines()[len(files) :])
    assert {entry["name"]: modes[f"root:root {entry['name']}"] for entry in files} == {
        entry["name"]: f"{entry['mode']:o}" for entry in files
    }

    for change in FILE_CHANGES.values():
        guest.run(change.format(names=names))
        run = fleet.site.deploy("--limit", guest.name)
        assert run.exit_code == 0, run.stderr[-3000:]
        assert set(run.changed) == {entry["operation"] for entry in files}, change
        assert guest.run(look) == right, change


# Ours too, but the plan alone does not know them: written for single jobs and switches, by the host
# itself, by bootstrap, or only on hosts that did not know the repository yet (test_prepare.py).
NOT_PLANNED = (
    "/etc/apt/keyrings/spark-", "/etc/apt/sources.list.d/spark-", "/etc/docker/daemon.json.before",
    "/var/lib/spark/",
    "/etc/systemd/system/spark-job@", "/usr/local/lib/spark/site-",
    "/etc/sudoers.d/90-spark-deploy",
)  # fmt: skip


def test_nothing_of_ours_is_missing_from_the_manifest(fleet: Fleet) -> None:
    fleet.settle()
    for guest in fleet.guests:
        listed = {entry["name"] for entry in manifest(fleet.site, guest)}
        found = guest.run(
            "find /etc /usr/local /var/lib -xdev -path /var/lib/docker -prune -o "
            "-type f -path '*spark*' ! -name '*.pyc' -print"
        ).splitlines()
        assert len(found) > 40
        release = guest.serving()[0].removeprefix("spark-serve@").removesuffix(".service")
        planned = [path for path in found if not path.startswith(NOT_PLANNED)]
        # Earlier releases stay until they are pruned.
        now = [path for path in planned if "main-" not in path or release in path]
        assert set(now) - listed == set()
