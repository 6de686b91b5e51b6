import signal
import time
from typing import Any

import pytest

from tests.faults.interruptions import DEPLOY, Host, run_watched
from tests.faults.pause import (
    JOBS,
    MissedError,
    Pause,
    assert_repaired,
    attach_to_job,
    kill_running,
    running_deploy,
)
from tests.host.conftest import USUAL
from tests.labkit import lab

IS_PROVEN = {
    "fetch": "ls {receipt}",
    "checkpoint": "ls {receipt}",
    "image-pull": "docker images -q {image}",
    "image-build": "docker images -q {image}",
}
FORGET = {
    "fetch": "rm -rf /srv/spark/models/* /srv/spark/sources/*",
    "checkpoint": "rm -rf /srv/spark/models/* /srv/spark/sources/*",
    "image-pull": "systemctl stop 'spark-serve@*'; "
    "docker rmi -f $(docker images -q '10.77.0.1:5000/*/stub*')",
    "image-build": "docker rmi -f $(docker images -q spark-vllm)",
}
GATE_JOBS, LONG_JOB = ["fetch", "checkpoint", "image-pull"], "image-build"
GATE_PHASES = ["drain", "start", "check", "open"]
MORE_PHASES = ["prove", "stop", "memory", "enable"]
BENCH, ROLLBACK = "bench", "rollback"


@pytest.mark.gate
@pytest.mark.parametrize("kind", GATE_JOBS)
def test_next_deploy_succeeds_after_controller_is_killed_during_job(fleet, kind):
    def settle_and_kill():
        fleet.settle(fleet.guests[0])
        kill_during_job(fleet, kind)

    retry_if_missed(fleet, settle_and_kill)


@pytest.mark.parametrize(
    "phase", [*(pytest.param(p, marks=pytest.mark.gate) for p in GATE_PHASES), *MORE_PHASES]
)
def test_next_deploy_succeeds_after_controller_is_killed_during_rollout_phase(fleet, phase):
    def switch_to_other_profile():
        profile = fleet.guests[0].release_document()["profile"]
        kill_during_phase(fleet, phase, profile="v2" if profile == "v2-tq" else "v2-tq")

    retry_if_missed(fleet, switch_to_other_profile)


@pytest.mark.gate
def test_next_deploy_succeeds_after_controller_is_killed_during_operation(fleet):
    guest = fleet.guests[0]
    fleet.settle(guest)
    fleet.site.choose(serve={"drain_s": 7})
    point = "Serve_|_Install_units_and_release during 0 0.05 KILL"
    result = run_watched(Host(guest.name, fleet.site, {}), DEPLOY, {"SPARK_DIE_AT": point})
    assert result.returncode == -signal.SIGKILL, result.stdout + result.stderr
    assert_repaired(fleet)
    assert guest.serving() == guest.boots() == [f"spark-serve@{guest.release()}.service"]
    assert guest.answers()


def test_next_deploy_succeeds_after_controller_is_killed_during_image_build(fleet):
    fleet.settle(fleet.guests[0])
    lab("prepare", "--engine", "cpu")
    fleet.site.choose(keep_ready=[{"model": "lab-tiny", "profile": "v2"}])
    kill_during_job(fleet, LONG_JOB, seconds=400)


def test_next_deploy_succeeds_after_controller_is_killed_during_bench(fleet):
    fleet.settle(fleet.guests[0])
    # Only a release that was never measured is measured.
    unmeasured = {"environment": {"STUB_LOG": f"never measured {time.time()}"}}
    kill_during_phase(fleet, BENCH, engine=unmeasured)


def test_rollback_finishes_after_controller_is_killed(fleet):
    guest = fleet.guests[0]
    fleet.settle(guest)
    before = guest.serving()
    fleet.site.choose(engine={"environment": {"STUB_FAULT": "garbage"}}, check={"timeout_s": 10})
    with Pause.rollout(guest, ROLLBACK) as pause, running_deploy(fleet) as process:
        paused = pause.wait()

        kill_running(process)

        result = rollout_result(guest, paused)
        assert (result["phase"], result["state"]) == (ROLLBACK, "running")
        assert guest.boots() == before
    guest.wait(f"systemctl is-failed {paused['unit']}")
    assert rollout_result(guest, paused)["state"] == "rolled-back"
    assert guest.serving() == guest.boots() == before
    assert guest.answers()
    fleet.settle(guest)
    fleet.site.deploy("--limit", guest.name).assert_unchanged()


def rollout_result(guest, paused):
    result: dict[str, Any] = guest.json(f"cat /var/lib/spark/switch/{paused['release']}.json")
    return result


def retry_if_missed(fleet, kill):
    for _ in range(5):
        try:
            return kill()
        except MissedError:
            assert_repaired(fleet)
    return kill()


def kill_during_job(fleet, kind, seconds=60):
    guest = fleet.guests[0]
    guest.run(FORGET[kind], check=False)
    with (
        Pause.job(guest, kind, JOBS[kind], seconds=seconds) as pause,
        running_deploy(fleet) as process,
    ):
        paused = pause.wait(seconds + 20)

        kill_running(process)

        def starts():
            return guest.run(f"journalctl -u {paused['unit']} -o cat | grep -c ^Starting")

        state, before = guest.unit(paused["unit"], "ActiveState", "SubState"), starts()
        assert state == {"ActiveState": "activating", "SubState": "start"}
        proven = guest.run(IS_PROVEN[kind].format(**paused["proof"]) + " 2>/dev/null || :")
        if proven and kind == "image-pull":
            raise MissedError("the image was complete before the client was paused")
        assert proven == ""
        attach_to_job(fleet, pause)
    assert starts() == before
    fleet.site.deploy("--limit", guest.name).assert_unchanged()


def kill_during_phase(fleet, phase, **choices):
    guest = fleet.guests[0]
    fleet.site.choices.clear()
    fleet.site.choose(**{**USUAL, **choices})
    with Pause.rollout(guest, phase) as pause, running_deploy(fleet) as process:
        paused = pause.wait()

        kill_running(process)

        result = rollout_result(guest, paused)
        assert (result["phase"], result["state"]) == (phase, "running")
        assert guest.unit(paused["unit"], "ActiveState") == {"ActiveState": "activating"}
    assert_repaired(fleet)
    assert guest.serving() == guest.boots() == [f"spark-serve@{paused['release']}.service"]
    assert guest.answers()
