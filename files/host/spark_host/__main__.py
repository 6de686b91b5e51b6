"""``spark-host VERB``: the entry point of everything that runs on the host."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from spark_contract import tool
from spark_contract.errors import ERROR, HostToolError, Problem
from spark_contract.paths import Paths

from spark_host.system.host import Host, default_paths
from spark_host.system.programs import print_json

Words = list[str]
Verb = Callable[[Words, Paths], int]


def _in(module: str, name: str = "main") -> Callable[..., Any]:
    """Import the module at the call only: imports dominate short verbs."""

    def call(*arguments: object) -> Any:
        return getattr(importlib.import_module(f"spark_host.{module}"), name)(*arguments)

    return call


_this_host = _in("rollout.steps", "this_host")
_poll_rollout = _in("rollout.record", "poll")
_begin_rollout = _in("rollout.record", "begin")


def _named(work: Callable[[str, Paths], int]) -> Verb:
    """Return a verb with a single argument: the name of a release or service."""
    return lambda words, paths: work(_name(words), paths)


def _name(words: Words) -> str:
    if len(words) != 1:
        raise HostToolError("spark-host", f"needs a single name, got {words}", "spark-host help", 2)
    return words[0]


def _poll(words: Words, paths: Paths) -> int:
    request = words[1] if len(words) == 2 else None
    print_json(_poll_rollout(_name(words[:1]), Host(paths), request))
    return 0


def _begin(name: str, paths: Paths) -> int:
    print_json(_begin_rollout(name, Host(paths)))
    return 0


def _daily(words: Words, paths: Paths) -> int:
    code: int = _in("watch.daily")(words, paths)
    _in("jobs.jobs", "remove_unused_tokens")(paths)
    return code


def _stop_service(words: Words, paths: Paths) -> int:
    options = dict(zip(words[1::2], words[2::2], strict=False))
    for_s = options.pop("--for", None)
    by = options.pop("--by", os.environ.get("SUDO_USER", "root"))
    if options or len(words) % 2 == 0 or not (for_s or "1").isdigit():
        raise HostToolError("spark-host stop-service", f"unknown words {words}", "see help", 2)
    stop: Callable[..., int] = _in("records.boot", "stop_service")
    return stop(words[0], by, Host(paths), float(for_s) if for_s else None)


def _on_service(work: Callable[..., int]) -> Verb:
    return lambda words, paths: work(_name(words), Host(paths))


def _on_rollout(work: Callable[..., int]) -> Verb:
    return lambda words, paths: work(_name(words), _this_host(paths))


def _uninstall(verb: str) -> Verb:
    return lambda words, paths: _in("cleanup.uninstall")(verb, _name(words), paths)


def _rollback(words: Words, paths: Paths) -> int:
    code: int = _in("rollout.rollback", "rollback")(words, _this_host(paths))
    return code


def _share(words: Words, paths: Paths) -> int:
    code: int = _in("gateway.share", "run")(paths)
    return code


_CHECK = "[RELEASE] [--quick|--full|--deep] [--json], --record [FILE], --compare RELEASE"
VERBS: dict[str, tuple[Verb, str]] = {
    tool.STATUS: (_in("status"), "[--live]: print the state of this host as JSON"),
    tool.EVIDENCE: (_in("evidence"), "print facts about engines, safe to publish, as JSON"),
    tool.CHECK: (_in("check.runner"), f"{_CHECK}: check the running engine"),
    "switch": (_on_rollout(_in("rollout.rollout", "roll_out")), "RELEASE: roll out a release"),
    "switch-recover": (
        _on_rollout(_in("rollout.rollout", "recover")), "RELEASE: finish a killed rollout"
    ),
    tool.SWITCH_BEGIN: (_named(_begin), "RELEASE: start a rollout, or join the running rollout"),
    tool.SWITCH_POLL: (_poll, "RELEASE [REQUEST]: print the state of a rollout as JSON"),
    tool.ROLLBACK: (_rollback, "SERVICE [--to RELEASE] [--dry]: go back to a proven release"),
    tool.PRUNE: (_in("cleanup.prune"), "[--dry] KEEP: remove unneeded files and images"),
    tool.NOTE: (_uninstall(tool.NOTE), "FOOTPRINT: record the host before the first deploy"),
    tool.MANIFEST: (_uninstall(tool.MANIFEST), "FOOTPRINT: list everything we created"),
    tool.UNINSTALL: (_uninstall(tool.UNINSTALL), "FOOTPRINT: remove everything we created"),
    tool.STOP_SERVICE: (_stop_service, "SERVICE [--by WHO] [--for SECONDS]: stop a service"),
    "start-when-due": (
        _on_service(_in("records.boot", "start_when_due")), "SERVICE: start it when due"
    ),
    tool.RETIRE_SERVICE: (
        _on_service(_in("records.boot", "retire_service")), "SERVICE: remove a service"
    ),
    tool.START_SERVICE: (
        _on_service(_in("records.boot", "start_service")),
        "SERVICE: start the last proven release again",
    ),
    "gateway": (_named(_in("gateway.gateway", "run")), "SERVICE: run the nginx"),
    tool.GATEWAY_RELOAD: (
        _named(_in("gateway.gateway", "reload")), "SERVICE: apply a new key or settings"
    ),
    tool.GATEWAY_NEW_KEY: (_named(_in("gateway.gateway", "new_key")), "SERVICE: replace the key"),
    "share": (_share, ": serve checkpoint files to other hosts"),
    "watch": (_named(_in("watch.watchdog", "run")), "RELEASE: watch the engine"),
    "daily": (_daily, ": inspect the host"),
    tool.JOB: (_in("jobs.jobs"), "run D12 | poll [D12...]: run a job, or print states of jobs"),
    tool.IMAGE: (
        _in("jobs.image"),
        "[--layers LAYERS.json] REFERENCE [COMMAND...]: pull an image, then run a command",
    ),
    tool.FABRIC: (
        _in("system.fabric_addresses"), "try|settled|confirm|restore: set fabric addresses"
    ),
    tool.FABRIC_SPEED: (_in("system.fabric_speed"), "listen|send: measure the fabric"),
    tool.FENCE: (_in("system.cluster", "fence"), "up|down RELEASE: firewall a cluster's ports"),
    "may-start": (_named(_in("engine.serve", "may_start")), "RELEASE: whether the unit may start"),
    "prepare": (_named(_in("engine.serve", "prepare")), "RELEASE: prepare the host for a start"),
    "serve": (_named(_in("engine.serve", "run")), "RELEASE: run the engine"),
    "stop": (_named(_in("engine.serve", "stop")), "RELEASE: stop the engine"),
    "after-stop": (_named(_in("engine.serve", "after_stop")), "RELEASE: clean up after the engine"),
}  # fmt: skip
_FIXES = {
    errno.ENOSPC: "free space on its disk: df -h, deploys/prune.py",
    errno.EROFS: "find out why its disk is read-only: dmesg",
    errno.EACCES: "run it as root: sudo",
    errno.EPERM: "run it as root: sudo",
}


def main(argv: Words) -> int:
    """Run a verb; an expected error is a single line on stderr."""
    if not argv or argv[0] not in VERBS:
        for verb, (_, text) in VERBS.items():
            print(f"spark-host {verb} {text}", file=sys.stderr)
        return 0 if argv[:1] == ["help"] else 2
    try:
        return VERBS[argv[0]][0](argv[1:], default_paths())
    except HostToolError as error:
        print(f"{ERROR}{error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        where = error.filename or f"spark-host {argv[0]}"
        fix = _FIXES.get(error.errno or 0, "see `journalctl -xe`, then run it again")
        line = Problem(where, str(error.strerror or error), fix).line
        print(f"{ERROR}{line}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
