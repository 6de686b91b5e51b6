"""Runs of Python modules, forked from one interpreter that has imported what they need.

Starting Python and importing takes longer than most runs of a command in a test. A run has a
process, a folder, an environment and arguments of its own, as `python -m` would give it. The test
process itself is no place to fork from: it has threads.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.lock import headers
from tests.judged_once import remember

PYINFRA = ("pyinfra_cli.cli", "spark_deploy.inventory.groups")
BUILDER = ("spark_checkpoint.plan_checks", "spark_checkpoint.requantize")
HOMES = [str(CHECKOUT / "files" / home) for home in ("contract", "checkpoint")]


def run(
    words: Sequence[str | Path],
    *,
    cwd: Path | str,
    env: Mapping[str, str],
    ready: Sequence[str] = PYINFRA,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m`` with these words; its standard input is empty.

    Args:
        words: the module, and its arguments.
        cwd: the folder it runs in.
        env: its whole environment.
        ready: modules that it imports, and that are imported once for all runs.
    """
    server = _server(tuple(ready))
    assert server.stdin is not None
    assert server.stdout is not None
    asked = {"words": [str(word) for word in words], "cwd": str(cwd), "env": dict(env)}
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    code, out, err = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess(asked["words"], code, out, err)


def have_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the controller's own runs of the builder forked, too."""

    def reader(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        words = command[command.index("-m") + 1 :]
        return run(words, cwd=how["cwd"], env=how["env"], ready=BUILDER)

    monkeypatch.setattr(headers, "subprocess", SimpleNamespace(run=reader, DEVNULL=None))


@cache
def _server(ready: tuple[str, ...]) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", *ready], cwd=CHECKOUT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # which closes its input, and so ends it
    return server


def _become(asked: dict[str, Any]) -> None:
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[0] = asked["cwd"]
    sys.argv = list(asked["words"])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _code_of(asked: dict[str, Any]) -> int:
    """Run it and return its exit status, as Python itself would end."""
    try:
        _become(asked)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _serve(ready: Sequence[str]) -> None:
    sys.path[1:1] = HOMES
    for module in ready:
        import_module(module)
    if PYINFRA[-1] in ready:  # what these runs read, too, is judged before they begin
        remember(pytest.MonkeyPatch())
        read_catalog()
    if ready == BUILDER:
        import_module("spark_checkpoint.sources.connections").tls_context()  # read once, too
    gc.freeze()
    for line in sys.stdin:
        with tempfile.TemporaryFile("r+") as out, tempfile.TemporaryFile("r+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = _code_of(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            _, status = os.waitpid(child, 0)
            for file in (out, err):  # the child left them at their ends
                file.seek(0)
            answer = (os.waitstatus_to_exitcode(status), out.read(), err.read())
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(tuple(sys.argv[1:]))
