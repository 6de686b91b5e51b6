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
    """Return a function whose module is imported when it is called.

    Most of what a short verb takes is Python importing: each pays for its own modules alone.
    """

    def called(*given: object) -> Any:
        return getattr(importlib.import_module(f"spark_host.{module}"), name)(*given)

    return called


_this_host = _in("rollout.steps", "this_host")


def _of_one(work: Callable[[str, Paths], int]) -> Verb:
    """Return a verb that is given the name of one release or service, and nothing else."""
    return lambda words, paths: work(_one(words), paths)


def _one(words: Words) -> str:
    if len(words) != 1:
        raise HostToolError("spark-host", f"wants one name, got {words}", "spark-host help", 2)
    return words[0]


def _poll(words: Words, paths: Paths) -> int:
    asked = words[1] if len(words) == 2 else None
    print_json(_in("rollout.record", "poll")(_one(words[:1]), Host(paths), asked))
    return 0


def _begin(name: str, paths: Paths) -> int:
    print_json(_in("rollout.record", "begin")(name, Host(paths)))
    return 0


def _daily(words: Words, paths: Paths) -> int:
    code: int = _in("watch.daily")(words, paths)
    _in("jobs.jobs", "remove_unused_tokens")(paths)
    return code


def _stop_service(words: Words, paths: Paths) -> int:
    more = dict(zip(words[1::2], words[2::2], strict=False))
    for_s = more.pop("--for", None)
    by = more.pop("--by", os.environ.get("SUDO_USER", "root"))
    if more or len(words) % 2 == 0 or not (for_s or "1").isdigit():
        raise HostToolError("spark-host stop-service", f"does not take {words}", "see its help", 2)
    stop: Callable[..., int] = _in("records.boot", "stop_service")
    return stop(words[0], by, Host(paths), float(for_s) if for_s else None)


def _leaving(verb: str) -> Verb:
    return lambda words, paths: _in("cleanup.uninstall")(verb, _one(words), paths)


VERBS: dict[str, tuple[Verb, str]] = {
    tool.STATUS: (_in("status"), "[--live]: everything about this host as JSON"),
    tool.EVIDENCE: (
        _in("evidence"),
        "what the running engine shows, fit to be sent to others, as JSON",
    ),
    tool.CHECK: (
        _in("check.runner"),
        "[RELEASE] [--quick|--full|--deep] [--json]: prove the running engine; --record [FILE] and "
        "--compare RELEASE: keep what it answers, and hold it against another",
    ),
    "switch": (
        _of_one(lambda name, paths: _in("rollout.rollout", "roll_out")(name, _this_host(paths))),
        "RELEASE: change to a release (run by spark-switch@RELEASE)",
    ),
    "switch-recover": (
        _of_one(lambda name, paths: _in("rollout.rollout", "recover")(name, _this_host(paths))),
        "RELEASE: finish a rollout that was killed",
    ),
    tool.SWITCH_BEGIN: (
        _of_one(_begin),
        "RELEASE: ask for the change, or join the one under way",
    ),
    tool.SWITCH_POLL: (_poll, "RELEASE [REQUEST]: how the last change to it stands, as JSON"),
    tool.ROLLBACK: (
        lambda words, paths: _in("rollout.rollback", "rollback")(words, _this_host(paths)),
        "SERVICE [--to RELEASE] [--dry]: go back to a proven release",
    ),
    tool.PRUNE: (
        _in("cleanup.prune"),
        "[--dry] KEEP: remove what no kept release needs; KEEP is JSON",
    ),
    tool.NOTE: (_leaving(tool.NOTE), "WANTED: write down what the host is before it is changed"),
    tool.MANIFEST: (
        _leaving(tool.MANIFEST),
        "WANTED: list everything of ours, and what would stay",
    ),
    tool.UNINSTALL: (_leaving(tool.UNINSTALL), "WANTED: remove what is ours; WANTED is JSON"),
    tool.STOP_SERVICE: (
        _stop_service,
        "SERVICE [--by WHO] [--for SECONDS]: stop it until someone starts it again, or for a while",
    ),
    "start-when-due": (
        _of_one(lambda name, paths: _in("records.boot", "start_when_due")(name, Host(paths))),
        "SERVICE: start it when a while is over (run by spark-return@SERVICE)",
    ),
    tool.RETIRE_SERVICE: (
        _of_one(lambda name, paths: _in("records.boot", "retire_service")(name, Host(paths))),
        "SERVICE: end it for good; what was made for it stays until a prune",
    ),
    tool.START_SERVICE: (
        _of_one(lambda name, paths: _in("records.boot", "start_service")(name, Host(paths))),
        "SERVICE: start the last proven release again",
    ),
    "gateway": (
        _of_one(_in("gateway.gateway", "run")),
        "SERVICE: run its nginx (run by spark-gateway@SERVICE)",
    ),
    tool.GATEWAY_RELOAD: (
        _of_one(_in("gateway.gateway", "reload")),
        "SERVICE: take over a new key or new settings",
    ),
    tool.GATEWAY_NEW_KEY: (
        _of_one(_in("gateway.gateway", "new_key")),
        "SERVICE: replace its API key, the old one is refused",
    ),
    "share": (
        lambda words, paths: _in("gateway.share", "run")(paths),
        "lend files of trees to other hosts (run by spark-share@trees)",
    ),
    "watch": (
        _of_one(_in("watch.watchdog", "run")),
        "RELEASE: watch its engine (run by spark-watch@RELEASE)",
    ),
    "daily": (_daily, ": look for what decays unnoticed (run by spark-daily.timer)"),
    tool.JOB: (_in("jobs.jobs"), "run D12 | poll [D12...]: run a job, or tell how jobs stand"),
    tool.IMAGE: (
        _in("jobs.image"),
        "[--layers LAYERS.json] REFERENCE [COMMAND...]: pull an image, then run a command with it",
    ),
    tool.FABRIC: (
        _in("system.fabric_addresses"),
        "try|confirm|restore: addresses of the ports between hosts, from a plan on standard input",
    ),
    tool.FABRIC_SPEED: (
        _in("system.fabric_speed"),
        "listen|send: one end of a short test of a way between hosts, from an order on standard "
        "input",
    ),
    tool.FENCE: (
        _in("system.cluster", "fence"),
        "up|down RELEASE: let members alone reach the ports of a cluster (run by its unit)",
    ),
    "may-start": (_of_one(_in("engine.serve", "may_start")), "RELEASE: whether its unit may start"),
    "prepare": (
        _of_one(_in("engine.serve", "prepare")),
        "RELEASE: make the host ready for its start",
    ),
    "serve": (
        _of_one(_in("engine.serve", "run")),
        "RELEASE: run its engine (run by spark-serve@RELEASE)",
    ),
    "stop": (_of_one(_in("engine.serve", "stop")), "RELEASE: stop its engine"),
    "after-stop": (
        _of_one(_in("engine.serve", "after_stop")),
        "RELEASE: clean up after its engine",
    ),
}


def main(argv: Words) -> int:
    """Run one verb; a deliberate error is one line on stderr."""
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
        print(f"{ERROR}{_in_words(argv[0], error)}", file=sys.stderr, flush=True)
        return 1


def _in_words(verb: str, error: OSError) -> str:
    where = error.filename or f"spark-host {verb}"
    fix = _FIXES.get(error.errno or 0, "see `journalctl -xe`, then run it again")
    return Problem(where, str(error.strerror or error), fix).line


_FIXES = {
    errno.ENOSPC: "free space on its disk: df -h, deploys/prune.py",
    errno.EROFS: "find out why its disk is read-only: dmesg",
    errno.EACCES: "run it as root: sudo",
    errno.EPERM: "run it as root: sudo",
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
