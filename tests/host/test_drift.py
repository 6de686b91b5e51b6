"""The next run repairs any change of a managed file, package, unit or account, and only that.

`spark-deploy status --files` lists what is managed.
"""

import json
import re
import shlex
from itertools import zip_longest
from typing import Any

Resource = dict[str, Any]
RELEASE = re.compile(r"(/releases/|@)[a-z]+-[0-9a-f]{12}\b")  # also of earlier tests

FILE_CHANGES = {
    "content": "sed -i '$a#x' {names}",
    "mode": "chmod 777 {names}",
    "owner": "chown nobody {names}",
    "existence": "rm {names}",
}
# Managed, but not in the plan: written for single jobs and rollouts, by the host, by bootstrap, or
# only on hosts without the repository, which test_prepare.py changes.
NOT_PLANNED = (
    "/etc/apt/keyrings/spark-", "/etc/apt/sources.list.d/spark-", "/etc/docker/daemon.json.before",
    "/var/lib/spark/",
    "/etc/systemd/system/spark-job@", "/usr/local/lib/spark/site-",
    "/etc/sudoers.d/90-spark-deploy",
)  # fmt: skip
# How to change each other kind of resource, and how to read its state with ordinary tools. A kind
# that is missing here fails the test.
KINDS = {
    "state": ("rm {name}", "stat -c '%a %U:%G' {name} && test -s {name} && echo something"),
    "keys": ("echo '{{}}' > {name}", "cat {name}"),
    "link": ("ln -sfn /nowhere {name}", "readlink {name}"),
    "directory": ("chmod 700 {name}; chgrp nogroup {name}", "stat -c '%a %U:%G' {name}"),
    "package": (
        "dpkg --force-depends --remove {name}",
        "dpkg-query -W -f '${{db:Status-Abbrev}}' {name}",
    ),
    "masked": ("systemctl unmask {name}", "systemctl is-enabled {name}"),
    "user": (
        "sed -i '/^{name}:/d' /etc/passwd",
        "getent passwd {name} | cut -d: -f 1,6,7 && id -Gn {name}",
    ),
    "image": ("docker rmi -f {name}", "docker image inspect -f '{{{{.Id}}}}' {name}"),
    "tree": (
        "rm $(ls -d {name}/*.safetensors | head -n 1)",
        "cd {name} && sha256sum $(ls | grep -v '^receipt.json$')",
    ),
    "active": ("systemctl stop {name}", "systemctl is-active {name}"),
    "enabled": ("systemctl disable {name}", "systemctl is-enabled {name}"),
}
EXCLUDED = {"python3", "nginx-light", "/var/lib/systemd/timers/stamp-spark-daily.timer"}
START = "Serve | Start new services"
WAIT = "Prepare | Wait for all jobs"
# Operations that must follow the repair.
FURTHER = {"tree": {WAIT}, "image": {WAIT}, "docker.io": {START}}


def list_owned(site, guest):
    shown = site.cli("status", "--files", "--planned", "--limit", guest.name, "--json")
    assert shown.returncode == 0, shown.stderr
    owned: list[Resource] = json.loads(shown.stdout)[guest.name]
    return owned


def test_deploy_repairs_content_mode_and_owner_of_all_files(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    files = [entry for entry in list_owned(fleet.site, guest) if entry["kind"] == "file"]
    assert len(files) > 40
    names = " ".join(shlex.quote(entry["name"]) for entry in files)
    state = f"sha256sum {names}; stat -c '%a %U:%G %n' {names}"
    before = guest.run(state)
    stats = before.splitlines()[len(files) :]
    assert stats == [f"{entry['mode']:o} root:root {entry['name']}" for entry in files]

    for change in FILE_CHANGES.values():
        guest.run(change.format(names=names))
        run = fleet.site.deploy("--limit", guest.name).assert_succeeded()
        assert set(run.changed) == {entry["operation"] for entry in files}, change
        assert guest.run(state) == before, change
        assert guest.run("systemctl is-active spark-daily.timer") == "active", change


def test_list_of_managed_files_includes_every_file_on_the_host(fleet):
    fleet.settle()
    for guest in fleet.guests:
        listed = {entry["name"] for entry in list_owned(fleet.site, guest)}
        paths = guest.run(
            "find /etc /usr/local /var/lib -xdev -path /var/lib/docker -prune -o "
            "-type f -path '*spark*' ! -name '*.pyc' -print"
        ).splitlines()
        assert len(paths) > 40
        planned = [path for path in paths if not path.startswith(NOT_PLANNED)]
        current = [path for path in planned if not RELEASE.search(path) or guest.release() in path]
        assert set(current) - listed == set()


def test_deploy_repairs_only_the_changed_file(fleet):
    fleet.settle()
    files = [entry for entry in list_owned(fleet.site, fleet.guests[0]) if entry["kind"] == "file"]
    for group in group_files(files):
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


def group_files(files):
    modules = []
    for entry in files:
        if entry["name"].endswith(".py"):
            modules.append(entry)
        else:
            yield [entry]
    for first in range(5):
        yield modules[first::5]


def stamps(guest):
    out = guest.run(
        "find /etc/spark /etc/systemd /etc/apt /etc/sysusers.d /usr/local -type f ! -name '*.pyc' "
        "-printf '%p %i %T@\\n'"
    )
    return dict(line.split(" ", 1) for line in out.splitlines())


def state_command(owned):
    _, state = KINDS[owned["kind"]]
    return f"( {state.format(name=owned['name'])} ) 2>/dev/null || :"


def apply_change(guest, owned):
    change, state = KINDS[owned["kind"]][0], state_command(owned)
    output = guest.run(
        f"{state}; echo ---; ( {change.format(name=owned['name'])} ) >&2 && echo --- && {state}"
    )
    before, changed = (output + "\n").split("---\n", 2)[::2]
    assert before.strip()
    assert before != changed, owned
    return before.strip()


def expected_operations(owned):
    further = FURTHER.get(owned["kind"], set()) | FURTHER.get(owned["name"], set())
    is_engine = owned["kind"] == "active" and owned["name"].startswith("spark-serve@")
    return {START if is_engine else owned["operation"], *further}


def test_deploy_repairs_only_the_changed_resource(fleet):
    fleet.settle()
    owned = [list_owned(fleet.site, guest) for guest in fleet.guests]
    assert {entry["kind"] for entry in owned[0]} - {"file"} == set(KINDS)
    resources = [
        [entry for entry in entries if entry["kind"] != "file" and entry["name"] not in EXCLUDED]
        for entries in owned
    ]
    wrong = []
    for pair in zip_longest(resources[0][::2], resources[1][1::2]):
        changed = [(guest, entry) for guest, entry in zip(fleet.guests, pair, strict=True) if entry]
        states = [apply_change(guest, entry) for guest, entry in changed]
        run = fleet.site.deploy()
        for (guest, entry), before in zip(changed, states, strict=True):
            operations = run.changed_on(guest.name)
            repaired = {name for name in operations if not name.endswith(" peer downloads")}
            if run.exit_code or repaired != expected_operations(entry):
                wrong.append(f"{entry['name']}: {repaired}\n{run.stderr}")
            elif (after := guest.run(state_command(entry)).strip()) != before:
                wrong.append(f"{entry['name']}: {after!r} instead of {before!r}")
    assert not wrong, "\n\n".join(wrong)
    fleet.site.deploy().assert_unchanged()
