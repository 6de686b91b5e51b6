"""``spark-host VERB``: the entry point of everything that runs on the host."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from spark_contract.errors import ERROR, HostToolError, Problem
from spark_contract.paths import Paths

from spark_host.system.stored import default_paths

Words = list[str]

# Imports are local to the verbs: the fact that a controller asks for most must be quick.


def _job(words: Words, paths: Paths) -> int:
    from spark_host.jobs import jobs

    return jobs.main(words, paths)


def _check(words: Words, paths: Paths) -> int:
    from spark_host.check import runner

    return runner.main(words, paths)


def _status(words: Words, paths: Paths) -> int:
    from spark_host import status

    return status.main(words, paths)


def _serve_step(verb: str) -> Callable[[Words, Paths], int]:
    def step(words: Words, paths: Paths) -> int:
        from spark_host.engine import serve

        steps = {
            "may-start": serve.may_start,
            "prepare": serve.prepare,
            "serve": serve.run,
            "stop": serve.stop,
            "after-stop": serve.after_stop,
        }
        return steps[verb](_one(words, "a release"), paths)

    return step


def _switch(words: Words, paths: Paths) -> int:
    from spark_host.rollout import ports, rollout

    return rollout.roll_out(_one(words, "a release"), ports.this_host(paths))


def _switch_recover(words: Words, paths: Paths) -> int:
    from spark_host.rollout import ports, recover

    return recover.recover(_one(words, "a release"), ports.this_host(paths))


def _switch_begin(words: Words, paths: Paths) -> int:
    from spark_host.rollout import request
    from spark_host.system.ports import Host

    return _print(request.begin(_one(words, "a release"), Host(paths)))


def _switch_poll(words: Words, paths: Paths) -> int:
    from spark_host.rollout import request
    from spark_host.system.ports import Host

    asked = words[1] if len(words) == 2 else None
    return _print(request.poll(_one(words[:1], "a release"), Host(paths), asked))


def _rollback(words: Words, paths: Paths) -> int:
    from spark_host.rollout import ports, way_back

    if not words or words[0].startswith("-"):
        raise HostToolError("rollback", "no service named", "rollback SERVICE [--to R] [--dry]", 2)
    return way_back.rollback(words, ports.this_host(paths))


def _prune(words: Words, paths: Paths) -> int:
    from spark_host.prune import prune

    return prune.main(words, paths)


def _stop_service(words: Words, paths: Paths) -> int:
    from spark_host.records import boot
    from spark_host.system.ports import Host

    by = os.environ.get("SUDO_USER", "root")
    if len(words) == 3 and words[1] == "--by":
        by = words[2]
        words = words[:1]
    return boot.stop_service(_one(words, "a service"), by, Host(paths))


def _start_service(words: Words, paths: Paths) -> int:
    from spark_host.records import boot
    from spark_host.system.ports import Host

    return boot.start_service(_one(words, "a service"), Host(paths))


def _gateway(words: Words, paths: Paths) -> int:
    from spark_host.gateway import gateway

    return gateway.run(_one(words, "a service"), paths)


def _gateway_reload(words: Words, paths: Paths) -> int:
    from spark_host.gateway import gateway

    return gateway.reload(_one(words, "a service"), paths)


def _gateway_new_key(words: Words, paths: Paths) -> int:
    from spark_host.gateway import gateway

    return gateway.new_key(_one(words, "a service"), paths)


def _watch(words: Words, paths: Paths) -> int:
    from spark_host.watch import loop

    return loop.run(_one(words, "a release"), paths)


def _print(value: dict[str, Any]) -> int:
    json.dump(value, sys.stdout)
    print()
    return 0


def _one(words: Words, what: str) -> str:
    if len(words) != 1:
        raise HostToolError("spark-host", f"wants {what}, got {words}", "see `spark-host help`", 2)
    return words[0]


VERBS: dict[str, tuple[Callable[[Words, Paths], int], str]] = {
    "status": (_status, "[--live]: everything about this host as JSON"),
    "check": (_check, "[RELEASE] [--quick|--full|--deep] [--json]: prove the running engine"),
    "switch": (_switch, "RELEASE: change to a release (run by spark-switch@RELEASE)"),
    "switch-recover": (_switch_recover, "RELEASE: finish a switch that was killed"),
    "switch-begin": (_switch_begin, "RELEASE: ask for the change, or join the one under way"),
    "switch-poll": (_switch_poll, "RELEASE [REQUEST]: how the last switch to it stands, as JSON"),
    "rollback": (_rollback, "SERVICE [--to RELEASE] [--dry]: go back to a proven release"),
    "prune": (
        _prune,
        "[--dry] KEEP: remove what no kept release needs; KEEP is JSON",
    ),
    "stop-service": (_stop_service, "SERVICE [--by WHO]: stop it until someone starts it again"),
    "start-service": (_start_service, "SERVICE: start the last proven release again"),
    "gateway": (_gateway, "SERVICE: run its nginx (run by spark-gateway@SERVICE)"),
    "gateway-reload": (_gateway_reload, "SERVICE: take over a new key or new settings"),
    "gateway-new-key": (_gateway_new_key, "SERVICE: replace its API key, the old one is refused"),
    "watch": (_watch, "RELEASE: watch its engine (run by spark-watch@RELEASE)"),
    "job": (_job, "run D12 | poll [D12...]: run a job, or tell how jobs stand"),
    "may-start": (_serve_step("may-start"), "RELEASE: whether its unit may start"),
    "prepare": (_serve_step("prepare"), "RELEASE: make the host ready for its start"),
    "serve": (_serve_step("serve"), "RELEASE: run its engine (run by spark-serve@RELEASE)"),
    "stop": (_serve_step("stop"), "RELEASE: stop its engine"),
    "after-stop": (_serve_step("after-stop"), "RELEASE: clean up after its engine"),
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
