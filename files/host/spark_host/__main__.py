"""``spark-host VERB``: the entry point of all programs that run on the host."""

import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from spark_contract import tool
from spark_contract.documents import DocumentError
from spark_contract.paths import Paths
from spark_contract.tool import ERROR, HostToolError, Problem

from spark_host.system.host import Host, default_paths
from spark_host.system.programs import print_json

Args = list[str]
_USAGE = "run `spark-host help`"


def _call(function: str, *arguments: Any) -> Any:
    """Call ``module:function``, and import the module only now, because imports are slow."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(f"spark_host.{module}"), name)(*arguments)


# Argument parsers return the arguments of a verb's function.


def _all_args(args: Args, paths: Paths) -> tuple[Args, Paths]:
    return args, paths


def _no_args(args: Args, paths: Paths) -> tuple[Paths]:
    return (paths,)


def _parse_name(args: Args, paths: Paths) -> tuple[str, Paths]:
    if len(args) != 1:
        raise HostToolError("spark-host", f"expected a single name, got {args}", _USAGE, 2)
    return args[0], paths


def _parse_name_and_host(args: Args, paths: Paths) -> tuple[str, Host]:
    return _parse_name(args, paths)[0], Host(paths)


def _parse_rollout(args: Args, paths: Paths) -> tuple[str, Any]:
    return _parse_name(args, paths)[0], _call("rollout.steps:this_host", paths)


def _parse_rollback(args: Args, paths: Paths) -> tuple[Args, Any]:
    return args, _call("rollout.steps:this_host", paths)


def _parse_poll(args: Args, paths: Paths) -> tuple[str, Host, str | None]:
    return *_parse_name_and_host(args[:1], paths), args[1] if len(args) == 2 else None


def _parse_stop(args: Args, paths: Paths) -> tuple[str, str, Host, float | None]:
    """Parse ``SERVICE [--for SECONDS] [--by USER]``."""
    options = dict(zip(args[1::2], args[2::2], strict=False))
    seconds = options.pop("--for", None)
    user = options.pop("--by", os.environ.get("SUDO_USER", "root"))
    if options or len(args) % 2 == 0 or (seconds and not seconds.isdigit()):
        raise HostToolError("spark-host stop-service", f"invalid arguments {args}", _USAGE, 2)
    return args[0], user, Host(paths), float(seconds) if seconds else None


def daily(args: Args, paths: Paths) -> int:
    code: int = _call("watch.daily:main", args, paths)
    _call("jobs:remove_unused_tokens", paths)
    _call("gateway.keys:add_logged_usage", paths)
    return code


_CHECK = "[RELEASE] [--quick|--full|--deep] [--json] | --record [FILE] | --compare RELEASE"
# verb: function (returns an exit code or a document), argument parser, help
VERBS: dict[str, tuple[str, Callable[[Args, Paths], tuple[Any, ...]], str]] = {
    tool.STATUS: ("status:main", _all_args, "[--live]: print the state of this host as JSON"),
    tool.EVIDENCE: (
        "status:read_evidence", _no_args, "print engine facts that are safe to publish, as JSON"
    ),
    tool.CHECK: ("check.runner:main", _all_args, f"{_CHECK}: check the running engine"),
    "switch": (
        "rollout.rollout:roll_out", _parse_rollout, "RELEASE: roll out a release"
    ),
    "switch-recover": (
        "rollout.rollout:recover", _parse_rollout, "RELEASE: finish a killed rollout"
    ),
    tool.SWITCH_BEGIN: (
        "rollout.record:begin", _parse_name_and_host, "RELEASE: start or join a rollout"
    ),
    tool.SWITCH_POLL: (
        "rollout.record:poll", _parse_poll,
        "RELEASE [REQUEST]: print the state of a rollout as JSON",
    ),
    tool.ROLLBACK: (
        "rollout.rollout:rollback", _parse_rollback,
        "SERVICE [--to RELEASE] [--dry]: return to a proven release",
    ),
    tool.PRUNE: (
        "cleanup.prune:main", _all_args, "[--dry] KEEP: remove files and images not listed in KEEP"
    ),
    tool.NOTE: (
        "cleanup.uninstall:note", _parse_name, "FOOTPRINT: record the state before the first deploy"
    ),
    tool.MANIFEST: ("cleanup.uninstall:manifest", _parse_name, "FOOTPRINT: list what we created"),
    tool.UNINSTALL: (
        "cleanup.uninstall:uninstall", _parse_name, "FOOTPRINT: remove what we created"
    ),
    tool.STOP_SERVICE: (
        "records.boot:stop_service", _parse_stop,
        "SERVICE [--by WHO] [--for SECONDS]: stop a service",
    ),
    "start-when-due": (
        "records.boot:start_when_due", _parse_name_and_host,
        "SERVICE: start a service after a timed stop",
    ),
    tool.RETIRE_SERVICE: (
        "records.boot:retire_service", _parse_name_and_host, "SERVICE: remove a service"
    ),
    tool.START_SERVICE: (
        "records.boot:start_service", _parse_name_and_host,
        "SERVICE: start the last proven release again",
    ),
    "gateway": ("gateway.gateway:run", _parse_name, "SERVICE: run the gateway (nginx)"),
    tool.GATEWAY_RELOAD: (
        "gateway.gateway:reload", _parse_name, "SERVICE: apply a new key or settings"
    ),
    tool.GATEWAY_NEW_KEY: ("gateway.gateway:new_key", _parse_name, "SERVICE: replace the key"),
    "share": ("gateway.nginx:share", _no_args, "serve checkpoint files to other hosts"),
    "on-request": ("relay:run", _no_args, "start services that requests are waiting for"),
    "watch": ("watch.watchdog:run", _parse_name, "RELEASE: watch the engine"),
    "daily": ("__main__:daily", _all_args, "inspect the host"),
    tool.JOB: (
        "jobs:main", _all_args,
        "run DIGEST | poll [DIGEST...] | end DIGEST: run, print or end jobs",
    ),
    tool.IMAGE: (
        "image:main", _all_args,
        "[--layers LAYERS.json] REFERENCE [COMMAND...]: pull an image, then run a command",
    ),
    tool.FABRIC: (
        "system.fabric:set_addresses", _all_args,
        "try|settled|confirm|restore: change the fabric's addresses",
    ),
    tool.FABRIC_SPEED: (
        "system.fabric:measure_speed", _all_args, "listen|send: measure the fabric"
    ),
    tool.FENCE: ("system.cluster:fence", _all_args, "up|down RELEASE: filter a cluster's ports"),
    "may-start": ("engine.serve:may_start", _parse_name, "RELEASE: check if the unit may start"),
    "prepare": ("engine.serve:prepare", _parse_name, "RELEASE: prepare the host for a start"),
    "serve": ("engine.serve:run", _parse_name, "RELEASE: run the engine"),
    "stop": ("engine.serve:stop", _parse_name, "RELEASE: stop the engine"),
    "after-stop": ("engine.serve:after_stop", _parse_name, "RELEASE: clean up after the engine"),
}  # fmt: skip
_FIXES = {
    errno.ENOSPC: "free disk space: see `df -h`, or run deploys/prune.py",
    errno.EROFS: "run `dmesg` to see why the disk is read-only",
    errno.EACCES: "run the command as root (`sudo`)",
    errno.EPERM: "run the command as root (`sudo`)",
}


def main(argv: Args) -> int:
    if not argv or argv[0] not in VERBS:
        for verb, (*_, text) in VERBS.items():
            print(f"spark-host {verb:<15} {text}", file=sys.stderr)
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
        fix = _FIXES.get(error.errno or 0, "see `journalctl -xe`, then run the command again")
        line = Problem(where, str(error.strerror or error), fix).line
        print(f"{ERROR}{line}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
