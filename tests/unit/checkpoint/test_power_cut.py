"""Cut the power at every call that touches the disk; unsynced data is really lost.

The disk is ext4 on a loop device. A cut kills the program at a call, shuts the filesystem down
without a journal flush (``EXT4_IOC_SHUTDOWN``) and mounts it again: unsynced files and directory
entries are gone. The test requires that some were.
"""

import fcntl
import json
import os
import struct
import subprocess
import sys

import pytest
from builder_faults import run_broken, spread_calls
from builder_trees import file_entries, run_tool, tool_environment, tree_tensors

from tests.faults.sweep import Sweep, assert_all_passed
from tests.unit.prerequisites import missing

SHUTDOWN, WITHOUT_FLUSH = 0x8004587D, 2
ABOUT = {
    "records": "state files of a host are written and replaced",
    "fetch": "a repository is fetched: parts, tree, receipt",
    "build": "a checkpoint is built: shards, tree, receipt",
}
COUNTED = (
    "A program is killed before each call that touches the disk (open, write, fsync, link, "
    "rename, mkdir, rmdir, unlink, reads), and the filesystem, ext4 on a loop device, is shut down "
    "without a journal flush. After the next mount state file or checkpoint is complete or absent, "
    "reported writes are there, and the next run finishes. Each case is a call."
)
TEST = "tests/unit/checkpoint/test_power_cut.py"
pytestmark = pytest.mark.slow
# Write ten state files, then replace each; report every finished write.
WRITER = """
import os, signal, sys
from pathlib import Path
from spark_contract import files
calls, number = [0], int(sys.argv[2])
for name in ("open", "write", "fsync", "rename", "mkdir", "unlink"):
    def wrap(real):
        def watched(*a, **k):
            calls[0] += 1
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*a, **k)
        return watched
    setattr(os, name, wrap(getattr(os, name)))
say = os.write.__closure__[0].cell_contents
for version in (1, 2):
    for record in range(10):
        path = Path(sys.argv[1]) / f"kind-{record % 3}" / f"{record}.json"
        files.write_text(path, '{"version": %d, "text": "%s"}' % (version, "x" * 3000))
        say(1, b"%d %d\\n" % (record, version))
say(2, b"%d" % calls[0])
"""


class Disk:
    def __init__(self, root):
        self.image, self.place = root / "disk.img", root / "disk"
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(96 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(self.image)], check=True)
        self.mount()

    def mount(self):
        """Mount the image through a new loop device.

        An old device in another mount namespace would keep the filesystem that was shut down.
        """
        done = subprocess.run(
            f"device=$(losetup -f --show '{self.image}') && mount $device '{self.place}'; rc=$?; "
            "losetup -d $device; exit $rc",  # when it is unmounted
            shell=True, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            missing(f"mount is not allowed here: {done.stderr.strip()}")

    def cut(self):
        before = self.content()
        handle = os.open(self.place, os.O_RDONLY)
        fcntl.ioctl(handle, SHUTDOWN, struct.pack("I", WITHOUT_FLUSH))
        os.close(handle)
        subprocess.run(["umount", str(self.place)], check=True)
        self.mount()
        return self.content() != before

    def content(self):
        paths = (path for path in self.place.rglob("*") if path.name != "lost+found")
        return {(str(path), path.stat().st_size if path.is_file() else 0) for path in paths}

    def sync(self):
        subprocess.run(["sync", "-f", str(self.place)], check=True)


@pytest.fixture
def disk(tmp_path):
    if os.geteuid() != 0:
        missing("mounting a filesystem needs root")
    made = Disk(tmp_path)
    yield made
    subprocess.run(["umount", "-l", str(made.place)], check=True)


def select_calls(calls):
    return (
        list(range(1, calls + 1)) if os.environ.get("SPARK_SWEEP_RESULTS") else spread_calls(calls)
    )


def sweep_calls(group, calls, cut_at):
    sweep, lost = Sweep("power"), []

    def cut(number):
        lost.append(cut_at(number))
        return "", "something was lost" if lost[-1] else "nothing was lost"

    rows = [
        sweep.run_case(group, f"call {number:04d} of {calls}", lambda number=number: cut(number))
        for number in select_calls(calls)
    ]
    sweep.write("Power cut at every call", ABOUT, None, COUNTED, TEST)
    assert_all_passed(rows)
    assert sum(lost) > len(lost) // 4, "too little was lost for a valid test"


def test_state_file_reported_as_written_survives_a_power_cut(disk):
    place = disk.place / "records"

    def run_writer(number):
        return subprocess.run(
            [sys.executable, "-c", WRITER, str(place), str(number)], env=tool_environment(),
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def cut_at(number):
        subprocess.run(["rm", "-rf", str(place)], check=True)
        place.mkdir()
        disk.sync()
        done = run_writer(number)
        assert done.returncode == -9
        lost = disk.cut()
        reported = dict(line.split() for line in done.stdout.splitlines())
        for record in range(10):
            path = place / f"kind-{record % 3}" / f"{record}.json"
            version = json.loads(path.read_text())["version"] if path.exists() else 0
            assert version >= int(reported.get(str(record), 0)), f"record {record} was lost"
        assert run_writer(0).returncode == 0
        return lost

    place.mkdir()
    done = run_writer(0)
    assert done.returncode == 0, done.stderr
    sweep_calls("records", int(done.stderr), cut_at)


def cut_each_call(verb, disk, order, out, content):
    calls = run_broken(verb, order).calls
    expected = content(out)

    def cut_at(number):
        subprocess.run(["rm", "-rf", str(out)], check=True)
        disk.sync()
        code = run_broken(verb, order, number=number).returncode
        assert code in (-9, 0)
        lost = disk.cut()
        assert out.exists() or code, f"lost after {verb} had reported success"
        if out.exists():
            run_tool("verify", out, "--full")
        run_tool(verb, order)
        assert content(out) == expected
        assert [path.name for path in out.parent.iterdir()] == [out.name]
        return lost

    sweep_calls(verb, calls, cut_at)
    return expected


def test_power_cut_leaves_no_partial_result_and_next_run_finishes_the_fetch(disk, order, source):
    out = disk.place / "models" / "out"
    out.parent.mkdir()
    path = order(out=str(out))
    assert cut_each_call("fetch", disk, path, out, file_entries) == file_entries(source)


def test_power_cut_leaves_no_partial_result_and_next_run_finishes_the_build(disk, workshop):
    workshop.write_base()
    workshop.write_donor()
    out = disk.place / "models" / "out"
    out.parent.mkdir()
    plan = workshop.write_plan(layout="full", head="int8-g128", out=str(out))
    assert cut_each_call("build", disk, plan, out, tree_tensors)
