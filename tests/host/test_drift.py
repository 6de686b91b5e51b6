"""Whatever changes on a host, the next run repairs exactly that."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.host.conftest import Fleet
from tests.labkit import CHECKOUT, Guest, Site


def manifest(site: Site, guest: Guest) -> list[dict[str, Any]]:
    """Ask the command that people use for everything we own on a host."""
    out = subprocess.run(
        [sys.executable, "-m", "spark_deploy", "manifest",
         str(site.root / "inventory/lab.py"), "--limit", guest.name, "--json"],
        capture_output=True, text=True, check=True, cwd=CHECKOUT,
    ).stdout  # fmt: skip
    return json.loads(out)[guest.name]


def mode_of(guest: Guest, path: str) -> str:
    return guest.run(f"stat -c '%a %U:%G' {shlex.quote(path)}")


CHANGES: dict[str, Callable[[str], str]] = {
    "link": lambda name: f"ln -sfn /nowhere {name}",
    "directory": lambda name: f"chmod 700 {name}; chown nobody {name}",
    "masked": lambda name: f"systemctl unmask {name}",
    "package": lambda name: f"dpkg --force-depends --remove {name}",
    "image": lambda name: f"docker rmi -f {name}",
    "tree": lambda name: f"rm $(ls -d {name}/*.safetensors | head -n 1)",
    "active": lambda name: f"systemctl stop {name}",
    "enabled": lambda name: f"systemctl disable {name}",
}
# What a removed package takes along is repaired by more than the operation that installs it.
ALSO = {
    "docker.io": {
        "Docker | Run the engine with our keys",
        "Docker | Prove the GPU in a container",
    },
    "nvidia-container-toolkit": {"Docker | Prove the GPU in a container"},
    "nginx-light": set(),
}


def test_each_thing_we_own_is_repaired_by_the_operation_that_owns_it(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    wrong = []
    for owned in manifest(fleet.site, guest):
        if owned["kind"] not in CHANGES or owned["name"] in ("python3", "ca-certificates"):
            continue
        guest.run(CHANGES[owned["kind"]](owned["name"]), check=False)
        run = fleet.site.deploy("--limit", guest.name)
        serve = f"Serve | Serve the release on {guest.name}"
        # Whatever stops the engine on the way is started again; nothing else may change.
        allowed = {owned["operation"], serve, "Serve | Wait until everything is prepared"}
        allowed |= ALSO.get(owned["name"], set())
        if run.exit_code or owned["operation"] not in run.changed or set(run.changed) - allowed:
            why = run.stderr[-2000:] if run.exit_code else ""
            wrong.append((owned["kind"], owned["name"], run.changed, run.failed, why))
    assert wrong == []
    assert fleet.site.deploy().changed == []


def test_every_file_we_own_gets_its_content_mode_and_owner_back(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    files = [owned for owned in manifest(fleet.site, guest) if owned["kind"] == "file"]
    # Written by the host itself: their content is the host's own.
    ours = [owned for owned in files if "/proofs/" not in owned["name"]
            and "api-key" not in owned["name"] and "/receipts/" not in owned["name"]]  # fmt: skip
    paths = [owned["name"] for owned in ours]
    quoted = " ".join(shlex.quote(path) for path in paths)
    look = f"sha256sum {quoted}; stat -c '%a %U:%G %n' {quoted}"
    right = guest.run(look)
    assert len(paths) > 40

    operations = {owned["operation"] for owned in ours}
    for change in (f"sed -i '$a#x' {quoted}", f"chmod 777 {quoted}", f"chown nobody {quoted}",
                   f"rm {quoted}"):  # fmt: skip
        guest.run(change)
        run = fleet.site.deploy("--limit", guest.name)
        assert run.exit_code == 0, run.stderr[-3000:]
        assert operations <= set(run.changed)
        assert guest.run(look) == right, change


def test_one_changed_file_is_one_repaired_file(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    by_operation = defaultdict(list)
    for owned in manifest(fleet.site, guest):
        if owned["kind"] == "file" and "/proofs/" not in owned["name"]:
            by_operation[owned["operation"]].append(owned["name"])

    for operation, paths in by_operation.items():
        path = paths[-1]
        others = (
            "find /etc/spark /etc/systemd/system /usr/local/lib/spark -type f ! -name '*.pyc' "
            f"! -path {shlex.quote(path)} -printf '%p %T@\\n' | sort"
        )
        before = guest.run(others)
        guest.run(f"rm {shlex.quote(path)}")

        run = fleet.site.deploy("--limit", guest.name)

        assert run.changed == [operation], path
        assert guest.run(others) == before, path
