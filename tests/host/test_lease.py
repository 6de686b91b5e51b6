"""Two controllers and one host: one run changes it, the other says who does and leaves it alone."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.labkit import SPARE, Guest, Site, info, lab

GUEST = SPARE[0]
LEASE = "/run/spark-deploy.lease"
HOLD = "/etc/apt/apt.conf.d/52spark-hold-driver"
DEPLOY = "deploys/prepare.py"


@pytest.fixture(scope="module")
def guest() -> Guest:
    lab("up", GUEST, "--fresh")
    return Guest(GUEST, next(one["ip"] for one in info()["guests"] if one["name"] == GUEST))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, guest: Guest) -> tuple[Site, Site]:
    made = [Site(tmp_path_factory.mktemp(name), hosts=[GUEST]) for name in ("ann", "ben")]
    for site in made:
        site.choose(model="lab-stub", profile="v2", takeover=[])
    return made[0], made[1]


def started(site: Site) -> subprocess.Popen[str]:
    return subprocess.Popen(
        site.command("--limit", GUEST, "-y", deploy=DEPLOY), cwd=site.root, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def is_held(guest: Guest) -> bool:
    return "yes" in guest.run(f"test -e {LEASE} && echo yes || :")


def test_of_two_runs_one_changes_the_host_and_the_other_says_who_does(
    sites: tuple[Site, Site], guest: Guest
) -> None:
    ann, ben = sites
    first = started(ann)
    guest.wait(f"test -e {LEASE}")
    dry = ben.deploy(deploy=DEPLOY, dry=True)
    second = ben.deploy(deploy=DEPLOY)
    assert first.poll() is None, "the first run ended before the second one"
    said, _ = first.communicate(timeout=600)
    assert first.returncode == 0, said[-3000:]
    assert dry.exit_code == 0, dry.stderr[-3000:]
    assert second.exit_code != 0
    assert "executed 0 commands" in second.stderr
    assert "Success" not in second.stderr
    assert "has been changing this host since 20" in second.stderr, second.stderr[-3000:]
    # Given back by the one that had it; the second run of either changes nothing, and takes none.
    assert not is_held(guest)
    again = ben.deploy(deploy=DEPLOY)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    assert not is_held(guest)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_holds_the_next_one_of_its_machine_up_for_no_second(
    sites: tuple[Site, Site], guest: Guest, how: signal.Signals
) -> None:
    ann, ben = sites
    # Something at the beginning of a run, and something at its end.
    guest.run(f"rm -f {HOLD}; systemctl stop docker.socket docker")
    run = started(ann)
    # Looked for on the host: what is left takes a calm machine less than a look from here.
    guest.run(f"until test -e {LEASE}; do sleep 0.02; done", timeout_s=60)
    run.send_signal(how)
    run.communicate(timeout=60)
    # Who interrupts a run gives the host back; one that was killed cannot.
    assert is_held(guest) == (how is signal.SIGKILL)
    again = ben.deploy(deploy=DEPLOY)
    assert again.exit_code == 0, again.stderr[-3000:]
    assert again.changed, again.stderr[-3000:]
    assert not is_held(guest), guest.run(f"cat {LEASE}") + again.stderr[-3000:]
