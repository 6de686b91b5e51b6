from tests.faults.pause import JOBS, Pause, assert_repaired, kill_running, running_deploy
from tests.labkit import lab


def complete_checkpoints(guest):
    receipts = "find /srv/spark/models -mindepth 2 -name receipt.json -printf '%h\\n' | sort"
    return guest.run(receipts).splitlines()


def partial_files(guest):
    folders = "/srv/spark/models /srv/spark/sources"
    return guest.run(f"find {folders} -path '*/.*.partial/*' -type f -size +0").splitlines()


def delete_unserved_checkpoints(guest):
    tree: str = guest.release_document()["tree"]["path"]
    guest.run(f"find /srv/spark/models -mindepth 1 -maxdepth 1 ! -path {tree} -exec rm -rf {{}} +")
    return tree


def test_checkpoint_build_continues_at_boot_after_power_cut(fleet):
    guest = fleet.guests[0]
    fleet.settle(guest)
    tree, before = delete_unserved_checkpoints(guest), guest.serving()
    fleet.site.choose(profile="v2-native")  # needs another checkpoint
    job = Pause.job(guest, "checkpoint", JOBS["checkpoint"])
    with running_deploy(fleet) as process, job as pause:
        paused = pause.wait()
        assert partial_files(guest) != []
        assert complete_checkpoints(guest) == [tree]
        kill_running(process)

        lab("break", "kill-guest", guest.name)
        pause.paused = {}
    lab("up", guest.name)

    guest.wait(f"systemctl is-active {before[0]}", seconds=90)
    assert guest.serving() == guest.boots() == before
    guest.wait(f"test -e {paused['proof']['receipt']}", seconds=90)
    assert guest.serving() == before
    assert guest.answers()
    assert partial_files(guest) == []
    assert_repaired(fleet)
    assert guest.serving() != before


def test_abandoned_checkpoint_build_does_not_continue_at_boot(fleet):
    guest = fleet.guests[0]
    fleet.settle(guest)
    delete_unserved_checkpoints(guest)
    limit = ("--limit", guest.name)
    boots_to_build = "ls /etc/systemd/system/multi-user.target.wants | grep ^spark-prepare@ || :"
    fleet.site.choose(profile="v2-native")
    job = Pause.job(guest, "checkpoint", JOBS["checkpoint"])
    with running_deploy(fleet) as process, job as pause:
        pause.wait()
        kill_running(process)
        assert len(guest.run(boots_to_build).splitlines()) == 1

        fleet.site.choose(profile="v2")
        run = fleet.site.deploy(*limit).assert_succeeded()
        assert run.changed == ["Serve | Wait for all jobs"]
        assert guest.run(boots_to_build) == ""
    fleet.site.deploy(*limit).assert_unchanged()


def test_checkpoint_with_a_missing_file_is_never_served(fleet):
    guest = fleet.guests[0]
    fleet.settle(guest)
    tree = delete_unserved_checkpoints(guest)
    receipt = f"{tree}/receipt.json"
    digest = guest.json(f"cat {receipt}")["digest"]
    unit = guest.serving()[0]
    guest.run(f"systemctl stop {unit}; rm {tree}/config.json {receipt}")

    guest.run(f"systemctl start {unit}", check=False, timeout_s=300)
    assert guest.serving() == []
    fleet.site.deploy("--limit", guest.name).assert_succeeded()
    assert guest.json(f"cat {receipt}")["digest"] == digest
    assert guest.answers()
