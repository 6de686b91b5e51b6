"""Forks a process per builder run, because importing numpy takes longer than most runs.

Not the test process itself: other tests load libraries that patch sockets and threads. As a script
it reads a JSON request per line and prints a JSON line.
"""

import errno
import gc
import json
import os
import signal
import sys
import tempfile

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


def run_request(request, result_path):
    from spark_checkpoint import storage
    from spark_checkpoint.__main__ import main

    fault = request.get("fault") or {}
    if fault.get("no_room_gate"):
        storage.check_free_space = lambda *_: None
    if "journal" in fault:
        keep_journal(fault["journal"])
    raw_write, raw_open = os.write, os.open
    calls = watch(
        fault.get("names", WATCHED),
        fault.get("number", 0),
        globals()[f"act_{fault.get('act', 'kill')}"],
        fault.get("path"),
        fault.get("only_path", False),
    )
    code = main(request["arguments"])
    raw_write(raw_open(result_path, os.O_WRONLY), str(calls[0]).encode())
    return code


def serve():
    import spark_checkpoint.__main__
    import spark_checkpoint.build.source_checks
    import spark_checkpoint.requantize  # noqa: F401
    from spark_checkpoint.sources import connections

    connections.tls_context()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        with (
            tempfile.NamedTemporaryFile("r+") as out,
            tempfile.NamedTemporaryFile("r+") as err,
            tempfile.NamedTemporaryFile("r+") as result,
        ):
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = 99
                try:
                    code = run_request(request, result.name)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            for file in (out, err, result):
                file.seek(0)
            answer = {
                "returncode": os.waitstatus_to_exitcode(status),
                "stdout": out.read(),
                "stderr": err.read(),
                "calls": int(result.read() or 0),
            }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
