"""A run without changes: pyinfra and an Ansible playbook in turns on the same hosts.

    python -m proofs.benchmarks.noop --inventory inventory/lab.py --data model=lab-stub \\
        --ansible VENV/bin lab-1 [lab-2 ...]

Guests must run (`python -m lab up 8 --engine stub`); they are deployed first. Measures wall time
and CPU seconds of the controller's processes and (by cgroup) of the guests.
"""

import argparse
import base64
import json
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from spark_contract.paths import CURRENT_TOOLS, GATEWAY_DIR, RELEASES_DIR, SITE, SYSUSERS
from spark_contract.tool import COMMANDS_DIR
from spark_contract.units import DAILY_LINK, UNITS_DIR

from lab import cgroup
from proofs import result_files
from spark_deploy.bench import report
from spark_deploy.hosts import base
from spark_deploy.hosts.base import HOLD_PATH
from spark_deploy.plan.jobs import DAEMON_JSON
from tests.labkit import Guest, guest_named

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS, ROUNDS = CHECKOUT / "proofs/results", 5
PACKAGES = (
    "dpkg-query -W -f '${Package}\\n' | grep -xE "
    "'python3|python3-venv|nginx-light|jq|rsync|git|acl|lsof|psmisc|file|openssl|ethtool|docker.io'"
)
_OURS = (
    f"{UNITS_DIR}/*spark-*.*", f"{UNITS_DIR}/spark-serve@*.service.d/*", DAEMON_JSON, SYSUSERS,
    f"{GATEWAY_DIR}/*.json", f"{RELEASES_DIR}/*/release.json", HOLD_PATH,
    f"{COMMANDS_DIR}/spark-*", base.EARLYOOM_PATH,
    *(file.path for file in base.GUARANTEE_FILES),
)  # fmt: skip
SUMS = f"find {CURRENT_TOOLS}/ -type f ! -name '*.pyc' -exec sha256sum {{}} +"
LINKS = (CURRENT_TOOLS, SITE, DAILY_LINK)
PLACED = f"for f in {' '.join(_OURS)}; do if [ -f $f ]; then echo $f; fi; done"


def cpu_seconds(guests: list[Guest]) -> dict[str, float]:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    hosts_s = sum(cgroup.cpu_s(guest.name) for guest in guests)
    return {"controller_cpu_s": children.ru_utime + children.ru_stime, "hosts_cpu_s": hosts_s}


def run_timed(command: list[str], guests: list[Guest], env: dict[str, str]) -> dict[str, float]:
    # With this variable modules would be compiled in every run.
    usual = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before, began = cpu_seconds(guests), time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, env={**usual, **env},
                          stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    wall_s = time.monotonic() - began
    if result.returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    if has_changes(command, result.stdout):
        raise SystemExit(f"{command[0]} changed something:\n{result.stdout[-3000:]}")
    after = cpu_seconds(guests)
    times = {name: round(after[name] - before[name], 2) for name in before}
    # The guests share the processors of the controller; real hosts do not.
    alone_s = wall_s - times["hosts_cpu_s"] / (os.cpu_count() or 1)
    return {"wall_s": round(wall_s, 2), "wall_without_hosts_s": round(alone_s, 2), **times}


def has_changes(command: list[str], output: str) -> bool:
    if "ansible" in command[0]:
        return set(re.findall(r"changed=(\d+)", output)) != {"0"}
    return any(operation["success"] for operation in json.loads(output)["results"]["operations"])


def playbook(folder: Path, guests: list[Guest], programs: Path) -> tuple[list[str], dict[str, str]]:
    hosts: dict[str, Any] = {}
    for guest in guests:
        files = guest.run(PLACED).split()
        for path in files:
            target = folder / guest.name / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            mode, text = guest.run(f"stat -c %a {path}"), guest.run(f"base64 -w0 {path}")
            target.write_bytes(base64.b64decode(text))
            target.chmod(int(mode, 8))
        (folder / f"{guest.name}.sums").write_text(guest.run(SUMS))
        login = guest.login()
        hosts[guest.name] = {
            "ansible_host": guest.ip, "ansible_user": login[-1].partition("@")[0],
            "ansible_ssh_private_key_file": login[2], "files": str(folder / guest.name),
            "ansible_python_interpreter": "/usr/bin/python3",
            "sums": str(folder / f"{guest.name}.sums"),
            "links": [{"path": path, "to": guest.run(f"readlink {path}")} for path in LINKS],
            "placed": files, "packages": guest.run(PACKAGES).split(),
            "serve": f"spark-serve@{guest.release()}.service",
            "watch": f"spark-watch@{guest.release()}.service",
        }  # fmt: skip
    # The inventory plugin reads this file as YAML, which includes JSON.
    (folder / "hosts.yml").write_text(json.dumps({"all": {"hosts": hosts}}))
    known = next(word for word in guests[0].login() if word.startswith("UserKnownHostsFile="))
    environment = {
        "ANSIBLE_PIPELINING": "True", "ANSIBLE_FORKS": str(max(5, len(guests))),
        "ANSIBLE_NOCOLOR": "1", "ANSIBLE_SSH_ARGS":
        f"-C -o ControlMaster=auto -o ControlPersist=60s -o {known} -o StrictHostKeyChecking=yes",
        "ANSIBLE_HOME": str(folder / "home"), "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    command = [str(programs / "ansible-playbook"), "-i", str(folder / "hosts.yml"),
               str(CHECKOUT / "proofs/benchmarks/ansible/noop.yml")]  # fmt: skip
    return command, environment


def count_commands(guests: list[Guest], start_times: dict[str, str]) -> int:
    query = "journalctl -t sudo --since @{} -o cat | grep -c COMMAND="
    return max(int(guest.run(query.format(start_times[guest.name]))) - 1 for guest in guests)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inventory", required=True)
    parser.add_argument("--ansible", type=Path, required=True)
    parser.add_argument("--data", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("hosts", nargs="+")
    options = parser.parse_args()
    data = [word for entry in options.data for word in ("--data", entry)]
    measurements = []
    for names in ([options.hosts[0]], options.hosts)[: len(options.hosts)]:
        guests = [guest_named(name) for name in names]
        with tempfile.TemporaryDirectory(prefix="noop-") as folder:
            limit = [word for name in names for word in ("--limit", name)]
            pyinfra_command = [str(Path(sys.executable).with_name("pyinfra")), options.inventory,
                    str(CHECKOUT / "deploy.py"), *limit, *data, "-y", "--json"]  # fmt: skip
            subprocess.run(
                pyinfra_command, capture_output=True, stdin=subprocess.DEVNULL, check=True
            )
            ansible_command, environment = playbook(Path(folder), guests, options.ansible)
            run_timed(ansible_command, guests, environment)  # so that both have been there once
            runs: dict[str, list[dict[str, float]]] = {"ours": [], "ansible": []}
            commands = {}
            tools = [("ours", pyinfra_command, {}), ("ansible", ansible_command, environment)]
            for number in range(ROUNDS):
                for kind, command, env in tools[:: -1 if number % 2 else 1]:
                    start_times = {guest.name: guest.run("date +%s.%6N") for guest in guests}
                    runs[kind].append(run_timed(command, guests, env))
                    commands[kind] = count_commands(guests, start_times)
        measurements.append({"hosts": len(names), "commands_a_host": commands, "runs": runs,
                      "load": os.getloadavg()[0]})  # fmt: skip
        sys.stdout.write(json.dumps(measurements[-1]) + "\n")
        sys.stdout.flush()
    result = {
        "benchmark": "no-op",
        "command": "python -m proofs.benchmarks.noop --inventory ... --ansible ... HOSTS",
        "commit": result_files.read_commit(),
        "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
        "stands_in": "guests of the virtual lab on a single machine; not a DGX Spark",
        "median": [summarize(entry) for entry in measurements],
        "found": measurements,
    }
    (RESULTS / "noop.json").write_text(json.dumps(result, indent=1) + "\n")
    groups = [
        (
            f"{entry['hosts']} host{'s' * (entry['hosts'] > 1)}: {kind}",
            [median_of(entry, kind, "wall_s"), median_of(entry, kind, "wall_without_hosts_s")],
        )
        for entry in measurements
        for kind in ("ours", "ansible")
    ]
    picture = report.draw_bars(
        groups, "A run without changes: seconds, and seconds without the hosts' computing time"
    )
    (RESULTS / "noop.svg").write_text(picture + "\n")
    return 0


def median_of(measurement: dict[str, Any], kind: str, key: str) -> float:
    return round(statistics.median(run[key] for run in measurement["runs"][kind]), 2)


def summarize(measurement: dict[str, Any]) -> dict[str, Any]:
    times = {
        kind: {key: median_of(measurement, kind, key) for key in measurement["runs"][kind][0]}
        for kind in ("ours", "ansible")
    }
    pyinfra, ansible = times["ours"], times["ansible"]
    ratio = {key: round(ansible[key] / max(pyinfra[key], 0.01), 1) for key in pyinfra}
    return {
        "hosts": measurement["hosts"],
        "commands_a_host": measurement["commands_a_host"],
        **times,
        "ansible_to_ours": ratio,
    }


if __name__ == "__main__":
    sys.exit(main())
