"""The very first deploy of a host fails: nothing is left serving, and the host stays usable.

There is nothing to go back to. Each test goes on where the one before it ended, as a person does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.plants import DEPLOYED
from tests.faults.test_hosts import wait_for_its_start
from tests.labkit import SPARE, Guest, Site, guest_named, info, lab
from tests.runs import Run

NAME = SPARE[0]
HOST = "/usr/local/lib/spark/current/bin/spark-host"
STARTED = r"\] +\(APIServer pid=\d+\) INFO .* Application startup complete\."
# What runs, listens or comes with the next boot; folders that do not exist yet hold nothing.
LEFT = {
    "units": "systemctl list-units --plain --no-legend --state=active,activating 'spark-*.service'",
    "jobs of systemd": "systemctl list-jobs --no-legend",
    "boots": "ls /etc/systemd/system/*.wants | grep ^spark- || :",
    "containers": "docker ps -aq",
    "listens": "ss -Hltn 'sport = :8000'",
}


class First:
    """A host made anew, and a first deploy of an engine that answers garbage."""

    def __init__(self, root: Path):
        lab("up", NAME, "--fresh", "--engine", "stub")
        self.guest: Guest = guest_named(NAME)
        self.before = self.guest.run("ls -d /etc/spark /var/lib/spark 2>/dev/null || :")
        self.site = Site(root, hosts=[NAME])
        self.usual = {"model": "lab-stub", "profile": "v2"}
        self.site.choose(**self.usual, **(DEPLOYED["garbage answers"].choices or {}))
        self.failed: Run = self.site.deploy()
        found = re.search(r"rollout of (main-[0-9a-f]{12}): ", self.failed.stderr)
        assert found, self.failed.stderr[-6000:]
        self.candidate = found[1]

    def choose_right(self) -> None:
        self.site.choices.clear()
        self.site.choose(**self.usual)

    def left(self) -> dict[str, str]:
        """Return what is there of ours that could serve, by the host's own tools."""
        return {what: self.guest.run(command) for what, command in LEFT.items()}

    def is_up(self) -> None:
        """Wait until the boot is over, docker's start included."""
        self.guest.wait("systemctl is-system-running | grep -qE 'running|degraded'", seconds=90)
        self.guest.wait("systemctl is-active docker", seconds=90)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[First]:
    made = First(tmp_path_factory.mktemp("site"))
    assert made.before == ""
    yield made
    lab("down", NAME)


def test_it_is_red_and_says_what_failed_with_the_log_and_that_nothing_serves(first: First) -> None:
    run = first.failed

    assert run.exit_code != 0
    assert f"{first.candidate}: failed-no-previous in phase start: " in run.stderr
    # The failed check in a sentence, and what the engine said instead of an answer.
    assert "ent fjord" in run.stderr
    assert re.search(STARTED, run.stderr), run.stderr[-4000:]
    assert "now serving: nothing\n" in run.stderr
    assert "the current release keeps serving" not in run.stderr


def test_nothing_runs_or_boots_and_the_candidate_is_neither_good_nor_a_way_back(
    first: First,
) -> None:
    assert first.left() == dict.fromkeys(LEFT, "")
    service = first.guest.json(f"{HOST} status")["services"]["main"]
    assert (service["good"], service["active"]) == (None, None)
    proof = first.guest.json(f"cat /var/lib/spark/proofs/{first.candidate}.json")
    assert proof["ok"] is False
    # Neither of the two ways in which people bring a server back takes it for one.
    back = first.site.deploy(deploy="deploys/rollback.py")
    assert back.exit_code != 0
    assert "nothing to go back to" in back.stderr
    code, said = first.site.tool("start")
    assert (code, "no proven release to start" in said) == (1, True), said
    assert first.left() == dict.fromkeys(LEFT, "")


def test_the_host_is_usable_and_status_says_that_it_serves_nothing(first: First) -> None:
    guest = first.guest
    image = info()["images"]["cuda-check"]
    name = f"{image['repository']}@{image['digest']}"
    assert guest.run(f"docker run --rm --runtime=nvidia {name} nvidia-smi -L").startswith("GPU 0")
    status = first.site.look("status")
    doctor = first.site.look("doctor")
    assert status.returncode == 1
    assert f"{NAME}: serves nothing" in status.stdout
    assert "serves nothing (wants " in status.stdout
    assert f", {first.candidate})" in status.stdout
    assert f"{NAME}: a deploy would go ahead" in doctor.stdout


def test_a_reboot_does_not_start_the_candidate(first: First) -> None:
    first.guest.reboot()

    first.is_up()
    assert first.left() == dict.fromkeys(LEFT, "")
    assert first.guest.run("journalctl -b -o cat -u 'spark-serve@*'") == ""


def test_a_power_cut_while_a_first_release_loads_leaves_nothing_either(first: First) -> None:
    first.site.choose(engine={"environment": {"STUB_LOAD_S": "60"}})
    process = first.site.start()
    release = wait_for_its_start(process)

    lab("break", "kill-guest", NAME)
    process.terminate()
    process.wait(timeout=60)
    lab("up", NAME)

    first.is_up()
    assert first.left() == dict.fromkeys(LEFT, "")
    assert first.guest.json(f"{HOST} switch-poll {release}")["state"] == "interrupted"


def test_the_right_choices_are_served_proven_and_the_next_deploy_changes_nothing(
    first: First,
) -> None:
    guest = first.guest
    first.choose_right()

    run = first.site.deploy()

    assert run.exit_code == 0, run.stderr[-4000:]
    # Tree and image were made by the run that failed: only the release is another.
    assert run.changed == ["Serve | Install units and release",
                           f"Serve | Serve the release on {NAME}"]  # fmt: skip
    serving = guest.release()
    assert serving != first.candidate
    assert guest.boots() == guest.serving()
    assert guest.answers("What is 7823 * 4519?", "35352137")
    proof = guest.json(f"cat /var/lib/spark/proofs/{serving}.json")
    assert (proof["ok"], proof["level"]) == (True, "full")
    assert (
        proof["invocation_id"]
        == guest.unit(f"spark-serve@{serving}", "InvocationID")["InvocationID"]
    )
    # The one that never served is no way back from this one either.
    good = guest.json("cat /var/lib/spark/good/main.json")
    assert (good["release"], good["previous"]) == (serving, [])
    first.site.deploy().must_have_changed_nothing()
