"""Runs the builder with a fault; as a module of ``tests.forked``."""

import errno
import json
import os
import signal
import sys

from spark_checkpoint import storage
from spark_checkpoint.__main__ import main as run_builder

# All calls of the builder that access the disk.
WRITING = ("open", "write", "pwrite", "fsync", "link", "rename", "mkdir")
WATCHED = (*WRITING, "readv", "preadv", "rmdir", "unlink")


def act_kill(target):
    os.kill(os.getpid(), signal.SIGKILL)


def act_disk_full(target):
    names = () if isinstance(target, int) else (str(target),)
    raise OSError(errno.ENOSPC, "No space left on device", *names)


def act_append(path):
    with open(path, "ab") as file:
        file.write(b"x")


def act_truncate(path):
    os.truncate(path, os.stat(path).st_size // 2)


def act_rewrite(path):
    with open(path, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"!")


def is_open_file(argument, path):
    return isinstance(argument, int) and os.readlink(f"/proc/self/fd/{argument}") == path


def watch(names, number, act, path, only_path):
    calls = [0]

    def wrap(name):
        original = getattr(os, name)

        def watched(*arguments, **keywords):
            if only_path and not is_open_file(arguments[0], path):
                return original(*arguments, **keywords)
            calls[0] += 1
            if calls[0] == number:
                act(path or arguments[0])
            return original(*arguments, **keywords)

        setattr(os, name, watched)

    for name in names:
        wrap(name)
    return calls


def keep_journal(path):
    real_fsync, real_rename = os.fsync, os.rename

    def keep(*event):
        with open(path, "a") as journal:
            journal.write(json.dumps(event) + "\n")

    def fsync(fd):
        real_fsync(fd)
        keep("fsync", os.fstat(fd).st_ino)

    def rename(source, target, **keywords):
        real_rename(source, target, **keywords)
        keep("rename", str(target))

    os.fsync, os.rename = fsync, rename


def main(fault, arguments):
    if fault.get("no_room_gate"):
        storage.check_free_space = lambda *_: None
    if "journal" in fault:
        keep_journal(fault["journal"])
    calls = watch(
        fault.get("names", WATCHED),
        fault.get("number", 0),
        globals()[f"act_{fault.get('act', 'kill')}"],
        fault.get("path"),
        fault.get("only_path", False),
    )
    code = run_builder(arguments)
    sys.stdout.write(f"calls={calls[0]}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
