"""Whatever changes on a host, the next run repairs exactly that.

`spark-deploy status --files` lists what we own. Here all files drift at once; each thing alone and
each file alone take minutes (test_drift_alone.py, test_drift_files.py).
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from tests.host.conftest import Fleet
from tests.labkit import Guest, Site

Owned = dict[str, Any]

FILE_CHANGES = {
    "content": "sed -i '$a#x' {names}",
    "mode": "chmod 777 {names}",
    "owner": "chown nobody {names}",
    "existence": "rm {names}",
}


def manifest(site: Site, guest: Guest) -> list[Owned]:
    """Ask the command that people use for everything we own on a host."""
    looked = site.look("status", "--files", "--planned", "--limit", guest.name, "--json")
    assert looked.returncode == 0, looked.stderr
    found: list[Owned] = json.loads(looked.stdout)[guest.name]
    return found


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
        # Its unit file was gone for a while.
        assert guest.run("systemctl is-active spark-daily.timer") == "active", change


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
