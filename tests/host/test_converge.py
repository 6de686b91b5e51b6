import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.host.conftest import FIRST
from tests.labkit import rollouts_overlap

pytestmark = pytest.mark.gate


def test_first_deploy_turns_bare_hosts_into_servers_that_passed_their_check(fleet):
    for guest in fleet.guests:
        assert len(guest.serving()) == 1
        assert guest.boots() == guest.serving()
        assert guest.answers()
        assert_proven(guest)


def test_engines_of_new_hosts_start_in_parallel(fleet):
    assert rollouts_overlap(fleet.guests, number=0)


def assert_proven(guest):
    proof, invocation = guest.proof(), guest.invocation()
    assert (proof["ok"], proof["invocation_id"]) == (True, invocation)
    return invocation


def test_second_deploy_changes_nothing(fleet, capsys):
    fleet.settle()
    # The journal filter has whole seconds: exclude the run before.
    since = {guest.name: guest.run("sleep 1; date +%s") for guest in fleet.guests}

    again = fleet.site.deploy()

    again.assert_unchanged()
    for guest in fleet.guests:
        assert again.operations("no_change", guest.name)
    for guest in fleet.guests:
        commands = guest.run(
            f"journalctl -t sudo --since @{since[guest.name]} -o cat | grep -c COMMAND="
        )
        assert int(commands) - 1 <= 13
        with capsys.disabled():
            sys.stdout.write(
                f"\n{guest.name}: {int(commands) - 1} commands in a run that changes nothing, "
                f"{again.seconds:.1f} s\n"
            )


# A change of the host or of the settings, and the operations that follow.
DIFFERENCES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "file missing": ("rm /usr/local/bin/spark-check", {}, ["Tools | Install host tools"]),
    "package missing": ("dpkg --force-depends --remove jq", {}, ["Base | Install packages"]),
    "daemon.json without our keys": (
        "echo '{}' > /etc/docker/daemon.json",
        {},
        ["Docker | Merge daemon.json"],
    ),
    "another profile": (
        ":",
        {"profile": "v2-tq"},
        ["Serve | Install units and release", f"Serve | Serve the release on {FIRST}"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_dry_run_predicts_exact_changes(fleet, name):
    command, choices, operations = DIFFERENCES[name]
    fleet.settle()
    guest = fleet.guests[0]
    guest.run(command)
    fleet.site.choose(**choices)
    before = guest.serving()

    predicted = fleet.site.deploy("--limit", FIRST, dry=True)
    assert guest.serving() == before
    run = fleet.site.deploy("--limit", FIRST).assert_succeeded()
    assert predicted.predicted == run.changed == operations


def test_dry_run_on_bare_hosts_predicts_first_run(fleet):
    changed = [name for name in fleet.first.changed if not name.endswith(" peer downloads")]
    assert fleet.bare.dry.assert_succeeded().predicted == changed


def test_both_hosts_serve_again_after_reboot(fleet):
    fleet.settle()
    before = [(guest.serving(), assert_proven(guest)) for guest in fleet.guests]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda guest: guest.reboot(seconds=180), fleet.guests))
    for guest, (units, invocation) in zip(fleet.guests, before, strict=True):
        guest.wait(f"systemctl is-active {units[0]} && curl -sf -o /dev/null "
                   "-H \"Authorization: Bearer $(cat /etc/spark/api-key)\" "
                   "http://127.0.0.1:8000/v1/models", seconds=180)  # fmt: skip
        assert guest.serving() == units
        assert assert_proven(guest) != invocation
    fleet.site.deploy().assert_unchanged()


def test_only_the_gateway_accepts_requests(fleet):
    fleet.settle()
    guest = fleet.guests[0]

    assert guest.answers()
    question = {"model": "x", "messages": [{"role": "user", "content": "Hello"}]}
    for key in ("wrong", ""):
        assert guest.call("POST", "/v1/chat/completions", question, key=key)[0] == 401
        assert guest.call("GET", "/v1/models", key=key)[0] == 401
    for path in ("/invocations", "/metrics", "/tokenize", "/version", "/load", "/docs"):
        assert guest.call("POST", path, {})[0] == 404, path
    assert guest.run("stat -c '%a %U' /etc/spark/api-key") == "600 root"
    listening = guest.run("ss -Hltn | awk '{print $4}'").split()
    loopback = {"127.0.0.1:8000", "[::1]:8000"}
    assert {address for address in listening if address.endswith(":8000")} == loopback


def test_up_runs_the_same_operations_as_the_printed_pyinfra_command(fleet):
    result = fleet.site.cli("up", "--dry", "--verbose")
    assert result.returncode == 0, result.stderr[-3000:]
    [line] = [line for line in result.stderr.splitlines() if "deploy.py --limit" in line]
    other = subprocess.run(
        shlex.split(line), cwd=fleet.site.root, capture_output=True, text=True, check=True,
        stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert operations_of(result.stderr) == operations_of(other.stderr)
    assert len(operations_of(result.stderr)) > 20


def operations_of(output):
    table = re.sub(r"\x1b\[[0-9;]*m", "", output).partition("Conditional Change")[2]
    return [row.split() for row in table.splitlines() if " | " in row]
