"""The whole product in one command: from nothing to two proven model servers.

Everything is run the way a user runs it (``pyinfra INVENTORY deploy.py``); only the hosts are
virtual.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lab import bad_switch, cgroup, room
from lab.distribution import missing_packages
from lab.errors import LabError
from lab.paths import LabPaths
from lab.room import Part

CHECKOUT = Path(__file__).resolve().parent.parent
INVENTORY = "inventory/lab.py"
HOSTS = ("lab-1", "lab-2")
# The lab may know others, from what was tried before; they may be down.
_LIMITS = [word for name in HOSTS for word in ("--limit", name)]
QUESTION = bad_switch.QUESTION
_MINUTES = {"stub": "2 to 5", "cpu": "6 to 15"}

T = TypeVar("T")


def run(state_dir: Path, up: Callable[[], None], engine: str) -> None:
    """Bring the lab up, deploy, ask, deploy again, and say how to go on.

    Args:
        state_dir: where the lab keeps ``lab.json``.
        up: brings up two fresh hosts, the second one as new as a Spark out of the box.
        engine: ``cpu``, the real one on this machine's processor, or ``stub``.

    Raises:
        LabError: a step failed; the message says which and how to look closer.
    """
    times: list[tuple[str, float, float]] = []

    def step(title: str, work: Callable[[], T]) -> T:
        print(f"\n=== {title}", flush=True)
        started, busy = time.monotonic(), _cpu_s()
        result = work()
        times.append((title, time.monotonic() - started, _cpu_s() - busy))
        return result

    model = [] if engine == "cpu" else ["--data", "model=lab-stub"]
    step("Two virtual hosts", up)
    info = json.loads((state_dir / "lab.json").read_text())
    others = [guest["name"] for guest in info["guests"] if guest["name"] not in HOSTS]
    info["guests"] = [guest for guest in info["guests"] if guest["name"] in HOSTS]
    step("Bootstrap: password login becomes key login", lambda: _bootstrap(info))
    step("Deploy: from bare hosts to proven servers", lambda: _pyinfra("deploy.py", *model, "-y"))
    step(f"Ask each host: {QUESTION}", lambda: _ask_all(info))
    changed = step("Deploy again", lambda: _again(model))
    title = "A bad switch: an engine that answers garbage is refused, and no client sees it"
    step(title, lambda: _bad_switch(info, model))
    print("\n     wall        CPU")
    for title, wall_s, cpu_s in [*times, ("in all", *_sums(times))]:
        print(f"{wall_s:8.1f} s {cpu_s:8.1f} s  {title}")
    print(f"\n{changed} changed" + ("" if changed == 0 else " (should be 0)"))
    say_how_to_go_on(others)
    if changed:
        raise LabError("deploy.py", f"the second run changed {changed} things", "run it with -v")


def _sums(times: list[tuple[str, float, float]]) -> tuple[float, float]:
    return sum(wall_s for _, wall_s, _ in times), sum(cpu_s for _, _, cpu_s in times)


def _cpu_s() -> float:
    """Return the processor's seconds of this program, of what it ran, and of the lab."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + cgroup.cpu_s()


def _tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def _pyinfra(deploy: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    command = [_tool("pyinfra"), INVENTORY, deploy, *_LIMITS, *arguments]
    print("$", shlex.join(["pyinfra", *command[1:]]), flush=True)
    done = subprocess.run(command, cwd=CHECKOUT, env={**os.environ, **(env or {})}, check=False)
    if done.returncode != 0:
        raise LabError(deploy, f"exited with {done.returncode}", "read the lines above")


def _bootstrap(info: dict[str, Any]) -> None:
    guest = next(guest for guest in info["guests"] if guest["bootstrap"])
    with (
        tempfile.NamedTemporaryFile("w", prefix="spark-", suffix=".password") as password,
        tempfile.NamedTemporaryFile("w", prefix="spark-", suffix=".host-keys") as host_keys,
    ):
        for file, text in ((password, guest["password"]), (host_keys, _host_key(guest))):
            file.write(f"{text}\n")
            file.flush()
        given = {
            "SPARK_BOOTSTRAP_PASSWORD_FILE": password.name,
            "SPARK_BOOTSTRAP_HOST_KEYS_FILE": host_keys.name,
        }
        _pyinfra("deploys/bootstrap.py", "-y", env=given)


def _host_key(guest: dict[str, Any]) -> str:
    return f"{guest['ip']} {guest['host_key']}"


def _curl(info: dict[str, Any], guest: dict[str, Any], path: str, body: str = "") -> Any:
    """Call the gateway on the guest; the key goes over standard input, never into argv."""
    ssh = info["ssh"]
    data = f"-H 'Content-Type: application/json' -d {shlex.quote(body)}" if body else ""
    command = (
        "sudo sed 's/.*/header = \"Authorization: Bearer &\"/' /etc/spark/api-key | "
        f"curl -sS --fail-with-body -K - {data} http://127.0.0.1:8000{path}"
    )
    done = subprocess.run(
        ["ssh", "-i", ssh["key"], "-o", f"UserKnownHostsFile={ssh['known_hosts']}",
         "-o", "BatchMode=yes", f"{ssh['user']}@{guest['ip']}", command],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        raise LabError(
            f"{guest['name']}: {path}",
            f"{done.stderr.strip()} {done.stdout.strip()}",
            f"python -m lab ssh {guest['name']}, then spark-check",
        )
    return json.loads(done.stdout)


def _ask_all(info: dict[str, Any]) -> None:
    for guest in info["guests"]:
        _ask(info, guest)


def _ask(info: dict[str, Any], guest: dict[str, Any]) -> None:
    names = [entry["id"] for entry in _curl(info, guest, "/v1/models")["data"]]
    body = {
        "model": names[0], "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 200, "temperature": 0,
    }  # fmt: skip
    answered = _curl(info, guest, "/v1/chat/completions", json.dumps(body))
    print(f"{guest['name']} serves {', '.join(names)}")
    print(f"  answer: {answered['choices'][0]['message']['content'].strip()!r}", flush=True)


def _again(model: list[str]) -> int:
    done = subprocess.run(
        [_tool("pyinfra"), INVENTORY, "deploy.py", *_LIMITS, *model, "-y", "--json"],
        cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        raise LabError("deploy.py", "the second run failed", "read the lines above")
    operations = json.loads(done.stdout)["results"]["operations"]
    return sum(1 for operation in operations if operation["success"] or operation["error"])


def say_what_it_takes(paths: LabPaths, engine: str) -> None:
    """Say before anything is done what comes onto this machine, and refuse a disk that is full."""
    found = room.parts(paths, CHECKOUT, HOSTS, engine)
    stays = sum(part.size_bytes for part in found if not part.passing)
    to_come = sum(part.to_come_bytes for part in found)
    missing = " ".join(missing_packages())
    print(
        f"This makes two virtual hosts with systemd, Docker and "
        f"{'the real vLLM on the CPU' if engine == 'cpu' else 'a stub engine'}, in {paths.state}.\n"
        f"  disk      {_gb(stays)} at the end; {_gb(to_come)} more at most than there is now"
    )
    for part in found:
        there = f", {_gb(part.there_bytes)} there" if part.there_bytes else ""
        print(f"            {_gb(part.size_bytes):>8}  {part.what}{there}")
    if engine == "cpu":
        gib = len(HOSTS) * room.ENGINE_MEMORY_BYTES >> 30
        print(f"  memory    {gib} GiB for the engines of {len(HOSTS)} hosts, by their plans")
    print(
        f"  time      {_MINUTES[engine]} minutes from nothing on two cores\n"
        f"  packages  {missing or 'none: all that hosts need is installed'}\n"
        "  undo      make lab-purge",
        flush=True,
    )
    _refuse_full_disks(found)


def _refuse_full_disks(found: Sequence[Part]) -> None:
    by_disk: dict[int, list[Part]] = {}
    for part in found:
        by_disk.setdefault(room.nearest(part.folder).stat().st_dev, []).append(part)
    for wanted in by_disk.values():
        folder = wanted[0].folder
        free = shutil.disk_usage(room.nearest(folder)).free
        to_come = sum(part.to_come_bytes for part in wanted)
        if free < to_come:
            what = f"{_gb(free)} free, {_gb(to_come)} needed"
            raise LabError(str(folder), what, "free some, or set SPARK_LAB_DIR to another disk")


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def _bad_switch(info: dict[str, Any], model: list[str]) -> None:
    ssh, guest = info["ssh"], info["guests"][0]
    login = [
        "ssh", "-i", ssh["key"], "-o", f"UserKnownHostsFile={ssh['known_hosts']}",
        "-o", "BatchMode=yes", f"{ssh['user']}@{guest['ip']}",
    ]  # fmt: skip

    def deploy(*words: str) -> subprocess.CompletedProcess[bytes]:
        argv = [INVENTORY, "deploy.py", "--limit", guest["name"], *model, *words, "-y"]
        print("$", shlex.join(["pyinfra", *argv]), flush=True)
        return subprocess.run([_tool("pyinfra"), *argv], cwd=CHECKOUT, check=False)

    bad_switch.show(login, deploy)


def say_how_to_go_on(others: Sequence[str]) -> None:
    """Say what can be done with the hosts of the demo; ``others`` of the lab may be down."""
    print(f"""
The lab stays up.
  talk to it       .venv/bin/spark-deploy connect {" ".join(HOSTS)} --inventory {INVENTORY}
  look into it     .venv/bin/python -m lab ssh {HOSTS[0]}
  switch profile   set `profile: v2-tq` in group_vars/lab.yml, then
                   .venv/bin/pyinfra {INVENTORY} deploy.py {" ".join(_LIMITS)} -y
  take it down     make lab-down; all of it, with its disks and caches: make lab-purge
""")
    if others:
        names = " ".join(others)
        print(f"It knows {names} from before; forget them with\n"
              f"                   .venv/bin/python -m lab down --delete {names}\n")  # fmt: skip
