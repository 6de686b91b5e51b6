import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lab import cgroup, room
from lab.distribution import missing_packages
from lab.errors import LabError
from lab.memory import limit_command
from lab.paths import LabPaths

CHECKOUT = Path(__file__).resolve().parent.parent
INVENTORY = "inventory/lab.py"
HOSTS = ("lab-1", "lab-2")
# The lab may have more hosts, which may be down.
_LIMITS = [word for name in HOSTS for word in ("--limit", name)]
QUESTION, ANSWER = "What is the capital of France?", "Paris"
RIGHT, RETRY = "right", "retry later (503)"
_PAUSE_S = 0.5
_MINUTES = {"stub": "5 to 10", "cpu": "12 to 25"}
# Memory for the main model and one of two others; a guest shows its machine's memory.
_TOTAL_GIB = {"stub": 3.7, "cpu": 9}
_MODELS_ON_REQUEST = ("one", "two")
FAULTY_RELEASE = (
    "--data",
    "model=lab-stub",
    "--data",
    "engine.environment=" + json.dumps({"STUB_FAULT": "garbage"}),
)
T = TypeVar("T")


def run(state_dir: Path, up: Callable[[], None], engine: str) -> None:
    """Start two hosts (``up``), deploy, send requests, deploy again, break it, switch models."""
    times: list[tuple[str, float, float]] = []

    def step(title: str, work: Callable[[], T]) -> T:
        print(f"\n=== {title}", flush=True)
        started, busy = time.monotonic(), _total_cpu_s()
        result = work()
        times.append((title, time.monotonic() - started, _total_cpu_s() - busy))
        return result

    model = [] if engine == "cpu" else ["--data", "model=lab-stub"]
    step("Two virtual hosts", up)
    info = json.loads((state_dir / "lab.json").read_text())
    others = [guest["name"] for guest in info["guests"] if guest["name"] not in HOSTS]
    info["guests"] = [guest for guest in info["guests"] if guest["name"] in HOSTS]
    logins = {guest["name"]: _login(info["ssh"], guest["ip"]) for guest in info["guests"]}
    step("Bootstrap: password login becomes key login", lambda: _bootstrap(info))
    step("Deploy: from bare hosts to proven servers", lambda: _pyinfra("deploy.py", *model, "-y"))
    step(f"Ask each host: {QUESTION}", lambda: _ask_each_host(logins))
    changed = step("Deploy again", lambda: _deploy_again(model))
    step(
        "Deploy a release that answers garbage: it is rejected, and clients notice only 503",
        lambda: _try_faulty_release(HOSTS[0], logins[HOSTS[0]], model),
    )
    step(
        "Two models that do not fit together: a request for the stopped one starts it",
        lambda: _switch_on_request(logins[HOSTS[0]], engine, model),
    )
    print("\n     wall        CPU")
    total = ("total", sum(wall_s for _, wall_s, _ in times), sum(cpu_s for _, _, cpu_s in times))
    for title, wall_s, cpu_s in [*times, total]:
        print(f"{wall_s:8.1f} s {cpu_s:8.1f} s  {title}")
    print(f"\n{changed} changed" + ("" if changed == 0 else " (should be 0)"))
    print_next_steps(others)
    if changed:
        raise LabError("deploy.py", f"the second run changed {changed} things", "run it with -v")


def _total_cpu_s() -> float:
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + cgroup.cpu_s()


def _tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else name


def _pyinfra(deploy: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    command = [_tool("pyinfra"), INVENTORY, deploy, *_LIMITS, *arguments]
    print("$", shlex.join(["pyinfra", *command[1:]]), flush=True)
    result = subprocess.run(command, cwd=CHECKOUT, env={**os.environ, **(env or {})}, check=False)
    if result.returncode != 0:
        raise LabError(deploy, f"failed with exit code {result.returncode}", "read the lines above")


def _bootstrap(info: dict[str, Any]) -> None:
    guest = next(guest for guest in info["guests"] if guest["bootstrap"])
    with (
        tempfile.NamedTemporaryFile("w", prefix="spark-", suffix=".password") as password,
        tempfile.NamedTemporaryFile("w", prefix="spark-", suffix=".host-keys") as host_keys,
    ):
        host_key = f"{guest['ip']} {guest['host_key']}"
        for file, text in ((password, guest["password"]), (host_keys, host_key)):
            file.write(f"{text}\n")
            file.flush()
        env = {
            "SPARK_BOOTSTRAP_PASSWORD_FILE": password.name,
            "SPARK_BOOTSTRAP_HOST_KEYS_FILE": host_keys.name,
        }
        _pyinfra("deploys/bootstrap.py", "-y", env=env)


def _login(ssh: dict[str, str], ip: str) -> list[str]:
    return [
        "ssh", "-i", ssh["key"], "-o", f"UserKnownHostsFile={ssh['known_hosts']}",
        "-o", "BatchMode=yes", f"{ssh['user']}@{ip}",
    ]  # fmt: skip


def _call(
    login: list[str], path: str, body: dict[str, Any] | None = None, port: int = 8000
) -> tuple[str, str]:
    data = f"-d {shlex.quote(json.dumps(body))}" if body else ""
    command = (
        "sudo sed 's/.*/header = \"Authorization: Bearer &\"/' /etc/spark/api-key | "
        "curl -sS -m 400 -K - -w '\\n%{http_code}' -H 'Content-Type: application/json' "
        f"{data} http://127.0.0.1:{port}{path}"
    )
    result = subprocess.run(
        [*login, command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    text, _, code = result.stdout.rpartition("\n")
    return code or "no answer", text or result.stderr.strip()


def _chat(login: list[str], model: str, port: int = 8000) -> tuple[str, str]:
    body = {
        "model": model, "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 200, "temperature": 0,
    }  # fmt: skip
    return _call(login, "/v1/chat/completions", body, port)


def _ask_each_host(logins: dict[str, list[str]]) -> None:
    for host, login in logins.items():
        code, text = _call(login, "/v1/models")
        names = [entry["id"] for entry in json.loads(text)["data"]] if code == "200" else []
        if names:
            code, text = _chat(login, names[0])
        if code != "200":
            raise LabError(host, f"{code} {text}", f"run `python -m lab ssh {host} spark-check`")
        answer = json.loads(text)["choices"][0]["message"]["content"].strip()
        print(f"{host} serves {', '.join(names)}\n  answer: {answer!r}", flush=True)


def _deploy_again(model: list[str]) -> int:
    result = subprocess.run(
        [_tool("pyinfra"), INVENTORY, "deploy.py", *_LIMITS, *model, "-y", "--json"],
        cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if result.returncode != 0:
        raise LabError("deploy.py", "the second run failed", "read the lines above")
    operations = json.loads(result.stdout)["results"]["operations"]
    return sum(1 for operation in operations if operation["success"] or operation["error"])


def _try_faulty_release(host: str, login: list[str], model: list[str]) -> None:
    before = _serving_units(login)
    with keep_asking(login) as answers:
        argv = [INVENTORY, "deploy.py", "--limit", host, *model, *FAULTY_RELEASE, "-y"]
        print("$", shlex.join(["pyinfra", *argv]), flush=True)
        result = subprocess.run([_tool("pyinfra"), *argv], cwd=CHECKOUT, check=False)
    after = _serving_units(login)
    counts = count_answers(answers)
    print(f"\nexit code {result.returncode}; serves {after}")
    print(f"answers to a client that kept asking: {counts}", flush=True)
    if result.returncode == 0:
        raise LabError("deploy.py", "a faulty release was accepted", "report this as a bug")
    if after != before or set(answers) - {RIGHT, RETRY} or answers[-1:] != [RIGHT]:
        what = f"{before} before, {after} after; client: {counts}"
        raise LabError("rollback", what, "read the lines above")


def _switch_on_request(login: list[str], engine: str, model: list[str]) -> None:
    limit = limit_command(_TOTAL_GIB[engine])
    subprocess.run([*login, f"sudo sh -c {shlex.quote(limit)}"], check=True)
    services = {
        name: {"model": "lab-stub" if model else "lab-tiny", "profile": "v2", "names": [name],
               "port": 8001 + number, "memory_gib": 3, "start": "on-request"}
        for number, name in enumerate(_MODELS_ON_REQUEST)
    }  # fmt: skip
    data = ["--data", f"services={json.dumps(services)}", "--data", "memory.total_gib=8"]
    argv = [INVENTORY, "deploy.py", "--limit", HOSTS[0], *model, *data, "-y"]
    print("$", shlex.join(["pyinfra", *argv]), flush=True)
    subprocess.run([_tool("pyinfra"), *argv], cwd=CHECKOUT, check=True)
    print(f"\n{_model_states(login)}", flush=True)
    started = time.monotonic()
    code, text = _chat(login, _MODELS_ON_REQUEST[0])
    print(f"request for {_MODELS_ON_REQUEST[0]}: {code} after {time.monotonic() - started:.0f} s\n"
          f"{_model_states(login)}", flush=True)  # fmt: skip
    if code != "200" or ANSWER not in text:
        raise LabError(HOSTS[0], f"{code} {text}", "read `journalctl -u spark-on-request` there")


def _model_states(login: list[str]) -> str:
    models = json.loads(_call(login, "/v1/models")[1])["data"]
    return ", ".join(f"{entry['id']} is {entry['state']}" for entry in models)


def _serving_units(login: list[str]) -> str:
    units = "systemctl list-units --plain --no-legend --state=active 'spark-serve@*'"
    result = subprocess.run(
        [*login, units], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return " ".join(line.split()[0] for line in result.stdout.splitlines() if line.strip())


@contextmanager
def keep_asking(login: list[str], port: int = 8000) -> Iterator[list[str]]:
    """Send requests during the block; yield the kinds of answers."""
    answers: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        code, text = _chat(login, "lab-model", port)
        kinds = {"200": RIGHT if ANSWER in text else f"200 {text[:80]!r}", "503": RETRY}
        answers.append(kinds.get(code, f"{code} {text[:80]!r}"))

    def ask_until_stopped() -> None:
        while not stop.is_set():
            ask()
            time.sleep(_PAUSE_S)

    thread = threading.Thread(target=ask_until_stopped)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()
        ask()


def count_answers(answers: Sequence[str]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(answers).items())


def print_requirements(paths: LabPaths, engine: str) -> None:
    disk_parts = room.list_parts(paths, CHECKOUT, HOSTS, engine)
    final = sum(part.size_bytes for part in disk_parts if not part.temporary)
    missing = sum(part.missing_bytes for part in disk_parts)
    packages = " ".join(missing_packages())
    print(
        f"This creates two virtual hosts with systemd, Docker and "
        f"{'real vLLM on the CPU' if engine == 'cpu' else 'a stub engine'} in {paths.state}.\n"
        f"  disk      {_gb(final)} at the end; at most {_gb(missing)} more than now"
    )
    for part in disk_parts:
        existing = f", {_gb(part.existing_bytes)} exist" if part.existing_bytes else ""
        print(f"            {_gb(part.size_bytes):>8}  {part.name}{existing}")
    if engine == "cpu":
        gib = len(HOSTS) * room.ENGINE_MEMORY_BYTES >> 30
        print(f"  memory    {gib} GiB for the engines of {len(HOSTS)} hosts")
    print(
        f"  time      {_MINUTES[engine]} minutes from nothing on two cores\n"
        f"  packages  {packages or 'none: everything is installed'}\n"
        "  undo      make lab-purge",
        flush=True,
    )
    folder = next(path for path in (paths.state, *paths.state.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < missing:
        what = f"{_gb(free)} free, {_gb(missing)} needed"
        raise LabError(str(paths.state), what, "free space, or set SPARK_LAB_DIR to another disk")


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def print_next_steps(others: Sequence[str]) -> None:
    print(f"""
The lab stays up.
  connect          .venv/bin/spark-deploy connect {" ".join(HOSTS)} --inventory {INVENTORY}
  open a shell     .venv/bin/python -m lab ssh {HOSTS[0]}
  switch profile   set `profile: v2-tq` in group_vars/lab.yml, then
                   .venv/bin/pyinfra {INVENTORY} deploy.py {" ".join(_LIMITS)} -y
  stop             make lab-down; with disks and caches: make lab-purge
""")
    if others:
        names = " ".join(others)
        print(f"The lab has older hosts: {names}; delete them with\n"
              f"                   .venv/bin/python -m lab down --delete {names}\n")  # fmt: skip
