"""Runs Python modules, forked from an interpreter that has already imported their dependencies."""

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
BUILDER = ("spark_checkpoint.build.build", "spark_checkpoint.requantize")
HOMES = [str(CHECKOUT / "files" / home) for home in ("contract", "checkpoint")]


def run(
    words: Sequence[str | Path],
    *,
    cwd: Path | str,
    env: Mapping[str, str],
    ready: Sequence[str] = PYINFRA,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m`` with these words and an empty standard input.

    Args:
        words: the module and arguments.
        cwd: the folder it runs in.
        env: the whole environment.
        ready: modules that it imports, and that are imported once for all runs.
    """
    server = _server(tuple(ready))
    assert server.stdin is not None
    assert server.stdout is not None
    request = {"words": [str(word) for word in words], "cwd": str(cwd), "env": dict(env)}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    code, out, err = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess(request["words"], code, out, err)


def fork_builder(monkeypatch: pytest.MonkeyPatch) -> None:
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
    atexit.register(server.communicate)
    return server


def _become(request: dict[str, Any]) -> None:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.argv = list(request["words"])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _code_of(request: dict[str, Any]) -> int:
    try:
        _become(request)
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
    if PYINFRA[-1] in ready:
        remember(pytest.MonkeyPatch())
        read_catalog()
    if ready == BUILDER:
        import_module("spark_checkpoint.sources.connections").tls_context()
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
            for file in (out, err):
                file.seek(0)
            answer = (os.waitstatus_to_exitcode(status), out.read(), err.read())
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(tuple(sys.argv[1:]))
