import signal

import pytest

from tests.labkit import SPARE, Site, guest_named, lab

GUEST = SPARE[0]
LEASE = "/run/spark-deploy.lease"
DRIVER_HOLD = "/etc/apt/apt.conf.d/52spark-hold-driver"
DEPLOY = "deploys/prepare.py"


@pytest.fixture(scope="module")
def guest():
    lab("up", GUEST, "--fresh")
    return guest_named(GUEST)


@pytest.fixture(scope="module")
def sites(tmp_path_factory, guest):
    sites = [Site(tmp_path_factory.mktemp(name), hosts=[GUEST]) for name in ("ann", "ben")]
    for site in sites:
        site.choose(model="lab-stub", profile="v2", takeover=[])
    return sites[0], sites[1]


def is_held(guest):
    return "yes" in guest.run(f"test -e {LEASE} && echo yes || :")


def test_second_controller_is_rejected_and_changes_nothing(sites, guest):
    ann, ben = sites
    first = ann.start(deploy=DEPLOY)
    guest.wait(f"test -e {LEASE}")
    ben.deploy(deploy=DEPLOY, dry=True).assert_succeeded()
    second = ben.deploy(deploy=DEPLOY)
    assert first.poll() is None, "the first run ended too early"
    output, _ = first.communicate(timeout=600)
    assert first.returncode == 0, output[-3000:]
    assert second.exit_code != 0
    assert "executed 0 commands" in second.stderr
    assert "started a change at 20" in second.stderr, second.stderr[-3000:]
    assert not is_held(guest)
    ben.deploy(deploy=DEPLOY).assert_unchanged()
    assert not is_held(guest)


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_deploy_does_not_block_the_next_deploy(sites, guest, signal_sent):
    ann, ben = sites
    guest.run(f"rm -f {DRIVER_HOLD}; systemctl stop docker.socket docker")
    run = ann.start(deploy=DEPLOY)
    guest.run(f"until test -e {LEASE}; do sleep 0.02; done", timeout_s=60)
    run.send_signal(signal_sent)
    run.communicate(timeout=60)
    assert is_held(guest) == (signal_sent is signal.SIGKILL)
    again = ben.deploy(deploy=DEPLOY).assert_succeeded()
    assert again.changed, again.stderr[-3000:]
    assert not is_held(guest), guest.run(f"cat {LEASE}") + again.stderr[-3000:]
