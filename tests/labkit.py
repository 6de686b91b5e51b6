"""Lab guests, and a user's repository to deploy from.

Tests inspect guests with ``ssh``, ``systemctl``, ``docker`` and ``curl``, never with the code under
test.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.runs import Run, read_output

CHECKOUT = Path(__file__).resolve().parent.parent
STATE = Path(os.environ.get("SPARK_LAB_DIR", "/var/lib/spark-lab"))
CAPITAL = "What is the capital of France?"
SPARE = tuple(os.environ.get("SPARK_SPARE_GUESTS", "lab-21 lab-22").split())


def lab(*arguments: str, timeout_s: float = 1500) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "lab", *arguments],
        cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout_s, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if result.returncode != 0:
        raise RuntimeError(
            f"lab {' '.join(arguments)}:\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
        )
    return result.stdout


@contextmanager
def broken(fault: str, guest: str) -> Iterator[None]:
    lab("break", fault, guest)
    try:
        yield
    finally:
        lab("break", fault, guest, "--heal")


def info() -> dict[str, Any]:
    state: dict[str, Any] = json.loads((STATE / "lab.json").read_text())
    return state


def _known_hosts() -> Path:
    """Write the lab's host keys, independent of those that a deploy recorded."""
    path = Path(tempfile.gettempdir()) / f"spark-lab-known-hosts-{os.getpid()}"
    # Rename into place, because another thread's ssh may read it at any time.
    new = path.with_name(f"{path.name}-{threading.get_ident()}")
    new.write_text("".join(f"{guest['ip']} {guest['host_key']}\n" for guest in info()["guests"]))
    new.replace(path)
    return path


@dataclass(frozen=True)
class Guest:
    name: str
    ip: str

    def run(self, command: str, *, check: bool = True, timeout_s: float = 120) -> str:
        result = subprocess.run(
            self._ssh(command),
            capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if check and result.returncode != 0:
            raise RuntimeError(
                f"{self.name}: {command!r} exited with {result.returncode}:\n"
                f"{result.stdout[-2000:]}{result.stderr[-2000:]}"
            )
        return result.stdout.rstrip("\n")

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._ssh(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _ssh(self, command: str) -> list[str]:
        return [*self.login(), f"sudo -n sh -c {shlex.quote(command)}"]

    def login(self) -> list[str]:
        ssh = info()["ssh"]
        return [
            "ssh", "-i", ssh["key"], "-o", f"UserKnownHostsFile={_known_hosts()}",
            "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes",
            "-o", "ConnectTimeout=5", f"{ssh['user']}@{self.ip}",
        ]  # fmt: skip

    def unit(self, unit: str, *fields: str) -> dict[str, str]:
        out = self.run(f"systemctl show -p {','.join(fields)} '{unit}'")
        return dict(line.split("=", 1) for line in out.splitlines())

    def json(self, command: str) -> Any:
        return json.loads(self.run(command))

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.json(
            "/usr/local/lib/spark/current/bin/spark-host status --live"
        )
        return status

    def serving(self) -> list[str]:
        out = self.run(
            "systemctl list-units --plain --no-legend --state=active 'spark-serve@*' "
            "| cut -d' ' -f1"
        )
        return [line for line in out.splitlines() if line]

    def release(self) -> str:
        (unit,) = self.serving()
        return unit.removeprefix("spark-serve@").removesuffix(".service")

    def release_document(self) -> dict[str, Any]:
        document: dict[str, Any] = self.json(
            f"cat /etc/spark/releases/{self.release()}/release.json"
        )
        return document

    def proof(self, release: str = "") -> dict[str, Any]:
        proof: dict[str, Any] = self.json(
            f"cat /var/lib/spark/proofs/{release or self.release()}.json"
        )
        return proof

    def invocation(self, release: str = "") -> str:
        """Return systemd's id of the engine's current run: a restart changes it."""
        unit = f"spark-serve@{release or self.release()}.service"
        return self.run(f"systemctl show -p InvocationID --value {unit}")

    def container(self) -> dict[str, Any]:
        container: dict[str, Any]
        [container] = self.json("docker inspect $(docker ps -q --filter label=spark.release)")
        return container

    def rollout_times(self) -> list[tuple[float, float]]:
        out = self.run(
            "journalctl -q -o short-unix _PID=1 | "
            "grep -E '(Starting|Finished|Failed to start) spark-switch@' | cut -d' ' -f1"
        )
        times = [float(word) for word in out.split()]
        return list(zip(times[::2], times[1::2], strict=True))

    def boots(self) -> list[str]:
        out = self.run(
            "ls /etc/systemd/system/multi-user.target.wants 2>/dev/null | grep '^spark-serve@' || :"
        )
        return out.split()

    def boot_id(self) -> str:
        # Guests share the kernel and its boot id, so use the start time of the guest's systemd.
        return self.run("systemctl show --property=UserspaceTimestampMonotonic --value")

    def wait_for_another_boot(self, before: str, *, seconds: float = 60) -> None:
        self.wait(
            "now=$(systemctl show --property=UserspaceTimestampMonotonic --value) && "
            f'test "${{now:-{before}}}" != {before}',
            seconds=seconds,
        )

    def reboot(self, *, seconds: float = 60) -> None:
        # From outside: with cgroups v1 systemd may wait 90 s for a session that requests a reboot.
        before = self.boot_id()
        lab("break", "reboot", self.name)
        self.wait_for_another_boot(before, seconds=seconds)

    def power_cut(self) -> None:
        """Kill the guest and boot it again; ``lab break power-cut`` also loses unsynced data."""
        lab("break", "kill-guest", self.name)
        lab("up", self.name)

    def wait_until_booted(self) -> None:
        # Services start during the boot; a CPU engine takes minutes on a loaded machine.
        self.wait("systemctl is-system-running | grep -qE 'running|degraded'", seconds=300)
        self.wait("systemctl is-active docker", seconds=90)

    def key(self) -> str:
        return self.run("cat /etc/spark/api-key")

    def argv(self) -> list[str]:
        config = self.container()["Config"]
        return [*config["Entrypoint"], *config["Cmd"]]

    def ask(self, prompt: str = CAPITAL, *, model: str = "", port: int = 8000) -> tuple[int, Any]:
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 200, "temperature": 0, "model": model or self.names()[0],
        }  # fmt: skip
        return self.call("POST", "/v1/chat/completions", body, port=port)

    def answers(self, prompt: str = CAPITAL, expected: str = "Paris") -> bool:
        status, body = self.ask(prompt)
        return status == 200 and expected in str(body)

    def metrics(self) -> str:
        return self.run(
            "curl -sS --unix-socket /run/spark/engines/main/engine.sock http://engine/metrics"
        )

    def names(self) -> list[str]:
        _, body = self.call("GET", "/v1/models")
        return [entry["id"] for entry in body["data"]]

    def call(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, port: int = 8000
    ) -> tuple[int, Any]:
        """Call a gateway on the guest's loopback address; return HTTP status and body.

        ``key`` is the host's key by default, read from standard input so that no log contains it.
        """
        own = "sed 's/.*/header = \"Authorization: Bearer &\"/' /etc/spark/api-key"
        given = f"echo {shlex.quote('header = ' + json.dumps(f'Authorization: Bearer {key}'))}"
        data = f"-d {shlex.quote(json.dumps(body))}" if body is not None else ""
        out = self.run(
            f"{own if key is None else given if key else ':'} | curl -K - -sS -m 120 "
            f"-w '\\n%{{http_code}}' -X {method} -H 'Content-Type: application/json' {data} "
            f"http://127.0.0.1:{port}{path}",
            check=False, timeout_s=180,
        )  # fmt: skip
        text, _, code = out.rpartition("\n")
        try:
            return int(code or 0), json.loads(text)
        except ValueError:
            return int(code or 0), text

    def wait(self, command: str, *, seconds: float = 60) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                return self.run(command, timeout_s=20)
            except (RuntimeError, subprocess.TimeoutExpired):
                time.sleep(0.5)
        raise TimeoutError(f"{self.name}: {command!r} did not succeed within {seconds:.0f} s")


@dataclass
class Site:
    root: Path
    hosts: list[str]
    choices: dict[str, Any] = field(default_factory=dict)
    checkout: Path = CHECKOUT

    def __post_init__(self) -> None:
        (self.root / "inventory").mkdir(parents=True, exist_ok=True)
        (self.root / "group_vars").mkdir(exist_ok=True)
        known_hosts = self.root / "known_hosts"
        shutil.copy(info()["ssh"]["known_hosts"], known_hosts)
        text = (self.checkout / "inventory/lab.py").read_text()
        for old, new in {
            "str(_pathlib.Path(__file__).resolve().parent.parent)": str(self.checkout),
            '_lab["ssh"]["known_hosts"]': str(known_hosts),
        }.items():
            if old not in text:
                raise RuntimeError(f"inventory/lab.py no longer contains {old}")
            text = text.replace(old, repr(new))
        (self.root / "inventory/lab.py").write_text(text)
        self.choose()

    def choose(self, **settings: Any) -> None:
        self.choices |= settings
        lab_settings = yaml.safe_load((self.checkout / "group_vars/lab.yml").read_text())
        merged = _merge(lab_settings, self.choices)
        (self.root / "group_vars/lab.yml").write_text(yaml.safe_dump(merged, sort_keys=False))

    @contextmanager
    def chosen(self, **settings: Any) -> Iterator[None]:
        before = dict(self.choices)
        self.choose(**settings)
        try:
            yield
        finally:
            self.choices = before
            self.choose()

    def reset(self, *names: str) -> None:
        for name in names:
            self.choices.pop(name, None)
        self.choose()

    def _limit(self, arguments: tuple[str, ...]) -> list[str]:
        if "--limit" in arguments:
            return []
        return [word for name in self.hosts for word in ("--limit", name)]

    def command(self, *arguments: str, deploy: str = "deploy.py") -> list[str]:
        pyinfra = Path(sys.executable).with_name("pyinfra")
        return [
            str(pyinfra), str(self.root / "inventory/lab.py"), str(self.checkout / deploy),
            *arguments,
        ]  # fmt: skip

    def deploy(
        self, *arguments: str, dry: bool = False, deploy: str = "deploy.py",
        timeout_s: float = 900, env: dict[str, str] | None = None,
    ) -> Run:  # fmt: skip
        limit = self._limit(arguments)
        began = time.monotonic()
        process = subprocess.Popen(
            self.command(*limit, *arguments, "--dry" if dry else "-y", "--json", deploy=deploy),
            cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})},
        )  # fmt: skip
        out: list[str] = []
        reader = threading.Thread(target=lambda: out.extend(process.stdout or ()))
        limiter = threading.Timer(timeout_s, process.kill)
        reader.start()
        limiter.start()
        try:
            stderr, silence = read_output(process.stderr, began)  # type: ignore[arg-type]
            reader.join()
            process.wait()
        finally:
            limiter.cancel()
        text = "".join(out)
        try:
            document = json.loads(text) if text.strip() else {}
        except ValueError:
            document = {"unreadable": text}
        return Run(process.returncode, document, stderr, time.monotonic() - began, silence)

    def bootstrap(self, name: str) -> Run:
        about = next(guest for guest in info()["guests"] if guest["name"] == name)
        password, host_keys = self.root / "password", self.root / "host_keys"
        password.touch(mode=0o600)
        password.write_text(about["password"] + "\n")
        host_keys.write_text(f"{about['ip']} {about['host_key']}\n")
        env = {
            "SPARK_BOOTSTRAP_PASSWORD_FILE": str(password),
            "SPARK_BOOTSTRAP_HOST_KEYS_FILE": str(host_keys),
        }
        return self.deploy(deploy="deploys/bootstrap.py", env=env)

    def cli_command(self, command: str, *arguments: str) -> list[str]:
        return [
            sys.executable, "-m", "spark_deploy", command, str(self.root / "inventory/lab.py"),
            *self._limit(arguments), *arguments,
        ]  # fmt: skip

    def cli(
        self, command: str, *arguments: str, timeout_s: float = 120,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        return subprocess.run(
            self.cli_command(command, *arguments),
            capture_output=True, text=True, check=False, cwd=self.checkout, timeout=timeout_s,
            stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})},
        )  # fmt: skip

    def cli_output(self, command: str, *arguments: str, timeout_s: float = 300) -> tuple[int, str]:
        result = self.cli(command, *arguments, timeout_s=timeout_s)
        return result.returncode, result.stdout + result.stderr

    def start(
        self, *arguments: str, deploy: str = "deploy.py", env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        limit = self._limit(arguments)
        return subprocess.Popen(
            self.command(*limit, *arguments, "-y", deploy=deploy),
            cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **(env or {})},
        )  # fmt: skip


def rollouts_overlap(guests: list[Guest], number: int = -1) -> bool:
    times = [guest.rollout_times()[number] for guest in guests]
    return max(start for start, _ in times) < min(end for _, end in times)


def guest_named(name: str) -> Guest:
    return next(Guest(name, entry["ip"]) for entry in info()["guests"] if entry["name"] == name)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 2).close()
        except OSError:
            assert time.monotonic() < deadline, f"no listener on port {port}"
            time.sleep(0.2)


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


def _merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: _merge(base.get(key), value) for key, value in over.items()}}
    return over


def pythonpath(checkout: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{checkout}:{checkout}/files/contract"}
