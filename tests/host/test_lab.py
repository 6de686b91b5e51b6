import re
import subprocess
from pathlib import Path

from tests.labkit import STATE, guest_named, lab

NAMES = ("lab-6", "lab-7")


def leftovers(name):
    commands = (["ip", "netns"], ["ip", "link"], ["losetup", "-a"], ["cat", "/proc/mounts"])
    shown = "".join(subprocess.check_output(command, text=True) for command in commands)
    lines = [line for line in shown.splitlines() if re.search(rf"\b{name}\b", line)]
    return lines + [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/lab/{name}")]


def test_lab_guests_keep_their_disks_after_reboot_and_power_cut():
    lab("up", *NAMES, "--fresh", "--engine", "none")
    guests = [guest_named(name) for name in NAMES]
    for guest in guests:
        guest.wait('test "$(systemctl is-system-running)" = running')
        assert guest.run("hostname; systemctl --failed --no-legend") == guest.name
    assert len({guest.run("cat /etc/machine-id") for guest in guests}) == 2

    guest = guests[0]
    guest.run("echo kept > /var/lib/kept; sync")
    guest.reboot()
    lab("break", "kill-guest", guest.name)
    lab("up", guest.name, "--engine", "none")
    assert guest.run("cat /var/lib/kept") == "kept"
    assert leftovers(guest.name) != []

    lab("down", *NAMES, "--delete")
    for name in NAMES:
        assert leftovers(name) == []
        assert not (STATE / "guests" / name).exists()
