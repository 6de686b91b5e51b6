"""``spark-host VERB``: the entry point of everything that runs on the host."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from spark_contract import tool
from spark_contract.documents import DocumentError
from spark_contract.errors import ERROR, HostToolError, Problem
from spark_contract.paths import Paths

from spark_host.system.host import Host, default_paths
from spark_host.system.programs import print_json

Words = list[str]
_USAGE = "run `spark-host help`"


def _call(function: str, *arguments: Any) -> Any:
    """Call ``module:function``; import it only now: imports dominate short verbs."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(f"spark_host.{module}"), name)(*arguments)


# Argument parsers return the arguments of a verb's function.


def _words(words: Words, paths: Paths) -> tuple[Words, Paths]:
    return words, paths


def _paths(words: Words, paths: Paths) -> tuple[Paths]:
    return (paths,)


def _name(words: Words, paths: Paths) -> tuple[str, Paths]:
    if len(words) != 1:
        raise HostToolError("spark-host", f"expected a single name, got {words}", _USAGE, 2)
    return words[0], paths


def _name_and_host(words: Words, paths: Paths) -> tuple[str, Host]:
    return _name(words, paths)[0], Host(paths)


def _rollout_arguments(words: Words, paths: Paths) -> tuple[str, Any]:
    return _name(words, paths)[0], _call("rollout.steps:this_host", paths)


def _rollback_arguments(words: Words, paths: Paths) -> tuple[Words, Any]:
    return words, _call("rollout.steps:this_host", paths)


def _poll_arguments(words: Words, paths: Paths) -> tuple[str, Host, str | None]:
    return *_name_and_host(words[:1], paths), words[1] if len(words) == 2 else None


def _stop_arguments(words: Words, paths: Paths) -> tuple[str, str, Host, float | None]:
    options = dict(zip(words[1::2], words[2::2], strict=False))
    for_s = options.pop("--for", None)
    by = options.pop("--by", os.environ.get("SUDO_USER", "root"))
    if options or len(words) % 2 == 0 or not (for_s or "1").isdigit():
        raise HostToolError("spark-host stop-service", f"unknown arguments {words}", _USAGE, 2)
    return words[0], by, Host(paths), float(for_s) if for_s else None


def daily(words: Words, paths: Paths) -> int:
    code: int = _call("watch.daily:main", words, paths)
    _call("jobs:remove_unused_tokens", paths)
    _call("gateway.keys:fold_usage", paths)
    return code


_CHECK = "[RELEASE] [--quick|--full|--deep] [--json], --record [FILE], --compare RELEASE"
# verb: function (returns an exit code or a document), argument parser, help
VERBS: dict[str, tuple[str, Callable[[Words, Paths], tuple[Any, ...]], str]] = {
    tool.STATUS: ("status:main", _words, "[--live]: print the state of this host as JSON"),
    tool.EVIDENCE: (
        "evidence:read_evidence", _paths, "print publishable facts about engines as JSON"
    ),
    tool.CHECK: ("check.runner:main", _words, f"{_CHECK}: check the running engine"),
    "switch": (
        "rollout.rollout:roll_out", _rollout_arguments, "RELEASE: roll out a release"
    ),
    "switch-recover": (
        "rollout.rollout:recover", _rollout_arguments, "RELEASE: finish a killed rollout"
    ),
    tool.SWITCH_BEGIN: (
        "rollout.record:begin", _name_and_host, "RELEASE: start or join a rollout"
    ),
    tool.SWITCH_POLL: (
        "rollout.record:poll", _poll_arguments,
        "RELEASE [REQUEST]: print the state of a rollout as JSON",
    ),
    tool.ROLLBACK: (
        "rollout.rollout:rollback", _rollback_arguments,
        "SERVICE [--to RELEASE] [--dry]: go back to a proven release",
    ),
    tool.PRUNE: (
        "cleanup.prune:main", _words, "[--dry] KEEP: remove unneeded files and images"
    ),
    tool.NOTE: (
        "cleanup.uninstall:note", _name, "FOOTPRINT: record the host before the first deploy"
    ),
    tool.MANIFEST: ("cleanup.uninstall:manifest", _name, "FOOTPRINT: list what we created"),
    tool.UNINSTALL: ("cleanup.uninstall:uninstall", _name, "FOOTPRINT: remove what we created"),
    tool.STOP_SERVICE: (
        "records.boot:stop_service", _stop_arguments,
        "SERVICE [--by WHO] [--for SECONDS]: stop a service",
    ),
    "start-when-due": (
        "records.boot:start_when_due", _name_and_host, "SERVICE: start it when due"
    ),
    tool.RETIRE_SERVICE: (
        "records.boot:retire_service", _name_and_host, "SERVICE: remove a service"
    ),
    tool.START_SERVICE: (
        "records.boot:start_service", _name_and_host,
        "SERVICE: start the last proven release again",
    ),
    "gateway": ("gateway.gateway:run", _name, "SERVICE: run the nginx"),
    tool.GATEWAY_RELOAD: (
        "gateway.gateway:reload", _name, "SERVICE: apply a new key or settings"
    ),
    tool.GATEWAY_NEW_KEY: ("gateway.gateway:new_key", _name, "SERVICE: replace the key"),
    "share": ("gateway.nginx:share", _paths, ": serve checkpoint files to other hosts"),
    "on-request": ("on_request.relay:run", _paths, ": start services that requests wait for"),
    "watch": ("watch.watchdog:run", _name, "RELEASE: watch the engine"),
    "daily": ("__main__:daily", _words, ": inspect the host"),
    tool.JOB: ("jobs:main", _words, "run D12 | poll [D12...]: run a job, or print job states"),
    tool.IMAGE: (
        "image:main", _words,
        "[--layers LAYERS.json] REFERENCE [COMMAND...]: pull an image, then run a command",
    ),
    tool.FABRIC: (
        "system.fabric_addresses:main", _words, "try|settled|confirm|restore: set fabric addresses"
    ),
    tool.FABRIC_SPEED: ("system.fabric_speed:main", _words, "listen|send: measure the fabric"),
    tool.FENCE: ("system.cluster:fence", _words, "up|down RELEASE: firewall a cluster's ports"),
    "may-start": ("engine.serve:may_start", _name, "RELEASE: whether the unit may start"),
    "prepare": ("engine.serve:prepare", _name, "RELEASE: prepare the host for a start"),
    "serve": ("engine.serve:run", _name, "RELEASE: run the engine"),
    "stop": ("engine.serve:stop", _name, "RELEASE: stop the engine"),
    "after-stop": ("engine.serve:after_stop", _name, "RELEASE: clean up after the engine"),
}  # fmt: skip
_FIXES = {
    errno.ENOSPC: "free disk space: df -h, deploys/prune.py",
    errno.EROFS: "check why the disk is read-only: dmesg",
    errno.EACCES: "run it as root: sudo",
    errno.EPERM: "run it as root: sudo",
}


def main(argv: Words) -> int:
    if not argv or argv[0] not in VERBS:
        for verb, (*_, text) in VERBS.items():
            print(f"spark-host {verb} {text}", file=sys.stderr)
        return 0 if argv[:1] == ["help"] else 2
    function, parse, _ = VERBS[argv[0]]
    try:
        result = _call(function, *parse(argv[1:], default_paths()))
        if isinstance(result, int):
            return result
        print_json(result)
        return 1 if getattr(result, "problems", ()) else 0
    except HostToolError as error:
        print(f"{ERROR}{error}", file=sys.stderr, flush=True)
        return error.exit_code
    except DocumentError as error:
        fix = "use the spark-deploy version that installed these tools"
        line = Problem(f"spark-host {argv[0]}", f"malformed request: {error}", fix).line
        print(f"{ERROR}{line}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        where = error.filename or f"spark-host {argv[0]}"
        fix = _FIXES.get(error.errno or 0, "see `journalctl -xe`, then run it again")
        line = Problem(where, str(error.strerror or error), fix).line
        print(f"{ERROR}{line}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
