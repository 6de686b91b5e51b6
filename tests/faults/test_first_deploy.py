"""A host's first deploy fails: no server is left, and the host stays usable.

Each test continues from the previous test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.bad_releases import DEPLOYED
from tests.faults.test_hosts import wait_for_candidate_start
from tests.labkit import SPARE, Guest, Site, guest_named, info, lab
from tests.runs import Run

NAME = SPARE[0]
SPARK_HOST = "/usr/local/lib/spark/current/bin/spark-host"
STARTED = r"\] +\(APIServer pid=\d+\) INFO .* Application startup complete\."
# Units, listeners and units of the next boot.
LEFTOVERS = {
    "units": "systemctl list-units --plain --no-legend --state=active,activating 'spark-*.service'",
    "jobs of systemd": "systemctl list-jobs --no-legend",
    "boots": "ls /etc/systemd/system/*.wants | grep ^spark- || :",
    "containers": "docker ps -aq",
    "listens": "ss -Hltn 'sport = :8000'",
}


class FirstDeploy:
    def __init__(self, root: Path):
        lab("up", NAME, "--fresh", "--engine", "stub")
        self.guest: Guest = guest_named(NAME)
        self.before = self.guest.run("ls -d /etc/spark /var/lib/spark 2>/dev/null || :")
        self.site = Site(root, hosts=[NAME])
        self.usual = {"model": "lab-stub", "profile": "v2"}
        self.site.choose(**self.usual, **(DEPLOYED["garbage answers"].choices or {}))
        self.failed: Run = self.site.deploy()
        named = re.search(r"rollout of (main-[0-9a-f]{12}): ", self.failed.stderr)
        assert named, self.failed.stderr[-6000:]
        self.candidate = named[1]

    def choose_right(self) -> None:
        self.site.choices.clear()
        self.site.choose(**self.usual)

    def leftovers(self) -> dict[str, str]:
        return {name: self.guest.run(command) for name, command in LEFTOVERS.items()}

    def wait_until_up(self) -> None:
        self.guest.wait("systemctl is-system-running | grep -qE 'running|degraded'", seconds=90)
        self.guest.wait("systemctl is-active docker", seconds=90)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstDeploy]:
    made = FirstDeploy(tmp_path_factory.mktemp("site"))
    assert made.before == ""
    yield made
    lab("down", NAME)


def test_reports_failed_check_with_engine_log(first: FirstDeploy) -> None:
    run = first.failed

    assert run.exit_code != 0
    assert f"{first.candidate}: failed-no-previous in phase start: " in run.stderr
    # The failed check, and the engine's wrong answer.
    assert "ent fjord" in run.stderr
    assert re.search(STARTED, run.stderr), run.stderr[-4000:]
    assert "now serving: nothing\n" in run.stderr


def test_candidate_neither_runs_nor_boots_nor_serves_as_rollback_target(
    first: FirstDeploy,
) -> None:
    assert first.leftovers() == dict.fromkeys(LEFTOVERS, "")
    service = first.guest.json(f"{SPARK_HOST} status")["services"]["main"]
    assert (service["good"], service["active"]) == (None, None)
    proof = first.guest.json(f"cat /var/lib/spark/proofs/{first.candidate}.json")
    assert proof["ok"] is False
    back = first.site.deploy(deploy="deploys/rollback.py")
    assert back.exit_code != 0
    code, output = first.site.cli_output("start")
    assert code == 1, output
    assert first.leftovers() == dict.fromkeys(LEFTOVERS, "")


def test_host_stays_usable_and_status_reports_no_server(first: FirstDeploy) -> None:
    guest = first.guest
    image = info()["images"]["cuda-check"]
    name = f"{image['repository']}@{image['digest']}"
    assert guest.run(f"docker run --rm --runtime=nvidia {name} nvidia-smi -L").startswith("GPU 0")
    status = first.site.cli("status")
    doctor = first.site.cli("doctor")
    assert status.returncode == 1
    assert f"{NAME}: serves nothing" in status.stdout
    assert "serves nothing (wants " in status.stdout
    assert f", {first.candidate})" in status.stdout
    assert f"{NAME}: a deploy would go ahead" in doctor.stdout


def test_reboot_does_not_start_candidate(first: FirstDeploy) -> None:
    first.guest.reboot()

    first.wait_until_up()
    assert first.leftovers() == dict.fromkeys(LEFTOVERS, "")
    assert first.guest.run("journalctl -b -o cat -u 'spark-serve@*'") == ""


def test_power_cut_while_first_release_loads_leaves_nothing(first: FirstDeploy) -> None:
    first.site.choose(engine={"environment": {"STUB_LOAD_S": "60"}})
    process = first.site.start()
    release = wait_for_candidate_start(process)

    lab("break", "kill-guest", NAME)
    process.terminate()
    process.wait(timeout=60)
    lab("up", NAME)

    first.wait_until_up()
    assert first.leftovers() == dict.fromkeys(LEFTOVERS, "")
    assert first.guest.json(f"{SPARK_HOST} switch-poll {release}")["state"] == "interrupted"


def test_corrected_settings_are_served_and_next_deploy_changes_nothing(
    first: FirstDeploy,
) -> None:
    guest = first.guest
    first.choose_right()

    run = first.site.deploy()

    assert run.exit_code == 0, run.stderr[-4000:]
    # Checkpoint and image exist since the failed run: only the release is new.
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
    # The candidate that never served is no rollback target.
    good = guest.json("cat /var/lib/spark/good/main.json")
    assert (good["release"], good["previous"]) == (serving, [])
    first.site.deploy().assert_unchanged()
