"""Two controllers and one host: the first changes it, the second reports that and ends."""

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
    return Guest(GUEST, next(entry["ip"] for entry in info()["guests"] if entry["name"] == GUEST))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, guest: Guest) -> tuple[Site, Site]:
    sites = [Site(tmp_path_factory.mktemp(name), hosts=[GUEST]) for name in ("ann", "ben")]
    for site in sites:
        site.choose(model="lab-stub", profile="v2", takeover=[])
    return sites[0], sites[1]


def start_deploy(site: Site) -> subprocess.Popen[str]:
    return subprocess.Popen(
        site.command("--limit", GUEST, "-y", deploy=DEPLOY), cwd=site.root, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def is_held(guest: Guest) -> bool:
    return "yes" in guest.run(f"test -e {LEASE} && echo yes || :")


def test_second_run_reports_first_and_changes_nothing(
    sites: tuple[Site, Site], guest: Guest
) -> None:
    ann, ben = sites
    first = start_deploy(ann)
    guest.wait(f"test -e {LEASE}")
    dry = ben.deploy(deploy=DEPLOY, dry=True)
    second = ben.deploy(deploy=DEPLOY)
    assert first.poll() is None, "the first run ended before the second one"
    output, _ = first.communicate(timeout=600)
    assert first.returncode == 0, output[-3000:]
    assert dry.exit_code == 0, dry.stderr[-3000:]
    assert second.exit_code != 0
    assert "executed 0 commands" in second.stderr
    assert "Success" not in second.stderr
    assert "has been changing this host since 20" in second.stderr, second.stderr[-3000:]
    # The first run released the lease; later runs without changes take none.
    assert not is_held(guest)
    again = ben.deploy(deploy=DEPLOY)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    assert not is_held(guest)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_run_does_not_block_next_run_of_same_machine(
    sites: tuple[Site, Site], guest: Guest, how: signal.Signals
) -> None:
    ann, ben = sites
    # Work for the start and for the end of the run.
    guest.run(f"rm -f {HOLD}; systemctl stop docker.socket docker")
    run = start_deploy(ann)
    # Poll on the host, because the run may be over sooner than a login.
    guest.run(f"until test -e {LEASE}; do sleep 0.02; done", timeout_s=60)
    run.send_signal(how)
    run.communicate(timeout=60)
    # An interrupted run releases the lease; a killed run cannot.
    assert is_held(guest) == (how is signal.SIGKILL)
    again = ben.deploy(deploy=DEPLOY)
    assert again.exit_code == 0, again.stderr[-3000:]
    assert again.changed, again.stderr[-3000:]
    assert not is_held(guest), guest.run(f"cat {LEASE}") + again.stderr[-3000:]
