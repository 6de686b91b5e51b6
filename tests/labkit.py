"""What lab tests need: guests to look into, and a user's own repository to deploy from.

Looking goes through plain ``ssh``, ``systemctl``, ``docker`` and ``curl``, never through the code
under test.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.runs import Run, listened

CHECKOUT = Path(__file__).resolve().parent.parent
STATE = Path(os.environ.get("SPARK_LAB_DIR", "/var/lib/spark-lab"))
# Guests for tests that break or make anew a host of their own, beside the fleet of the others.
SPARE = tuple(os.environ.get("SPARK_SPARE_GUESTS", "lab-21 lab-22").split())


def lab(*arguments: str, timeout_s: float = 1500) -> str:
    """Run a lab command and return what it printed.

    Raises:
        RuntimeError: it failed; the message holds its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "lab", *arguments],
        cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout_s, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(
            f"lab {' '.join(arguments)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def info() -> dict[str, Any]:
    """Return what ``lab up`` wrote about the running lab."""
    state: dict[str, Any] = json.loads((STATE / "lab.json").read_text())
    return state


def _known_hosts() -> Path:
    """Write the host keys the lab made, so that looking does not rest on what a deploy recorded."""
    path = Path(tempfile.gettempdir()) / f"spark-lab-known-hosts-{os.getpid()}"
    # Renamed into place: an ssh of another thread must not meet a file that is half written.
    new = path.with_name(f"{path.name}-{threading.get_ident()}")
    new.write_text("".join(f"{guest['ip']} {guest['host_key']}\n" for guest in info()["guests"]))
    new.replace(path)
    return path


@dataclass(frozen=True)
class Guest:
    """One virtual host, looked at through ssh."""

    name: str
    ip: str

    def run(self, command: str, *, check: bool = True, timeout_s: float = 120) -> str:
        """Run a command as root on the guest and return its output without the last newline."""
        done = subprocess.run(
            self._ssh(command),
            capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise RuntimeError(
                f"{self.name}: {command!r} exited with {done.returncode}:\n"
                f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.stdout.rstrip("\n")

    def begin(self, command: str) -> subprocess.Popen[str]:
        """Start a command as root on the guest and come back at once."""
        return subprocess.Popen(
            self._ssh(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _ssh(self, command: str) -> list[str]:
        return [*self.login(), f"sudo -n sh -c {shlex.quote(command)}"]

    def login(self) -> list[str]:
        """Return the command line that logs in, as the user of the host."""
        ssh = info()["ssh"]
        return [
            "ssh", "-i", ssh["key"], "-o", f"UserKnownHostsFile={_known_hosts()}",
            "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes",
            "-o", "ConnectTimeout=5", f"{ssh['user']}@{self.ip}",
        ]  # fmt: skip

    def unit(self, unit: str, *fields: str) -> dict[str, str]:
        """Return fields of a unit by systemd's word."""
        out = self.run(f"systemctl show -p {','.join(fields)} '{unit}'")
        return dict(line.split("=", 1) for line in out.splitlines())

    def json(self, command: str) -> Any:
        """Run a command that prints JSON."""
        return json.loads(self.run(command))

    def status(self) -> dict[str, Any]:
        """Return the host tools' own view (only to wait on, never to judge by)."""
        status: dict[str, Any] = self.json(
            "/usr/local/lib/spark/current/bin/spark-host status --live"
        )
        return status

    def serving(self) -> list[str]:
        """Return the active serve units, by systemd's word."""
        out = self.run(
            "systemctl list-units --plain --no-legend --state=active 'spark-serve@*' "
            "| cut -d' ' -f1"
        )
        return [line for line in out.splitlines() if line]

    def release(self) -> str:
        """Return the one release that serves, by systemd's word."""
        (unit,) = self.serving()
        return unit.removeprefix("spark-serve@").removesuffix(".service")

    def changes(self) -> list[tuple[float, float]]:
        """Return when each change of release began and ended, by systemd's word.

        Times of guests compare: they share a clock.
        """
        out = self.run(
            "journalctl -q -o short-unix _PID=1 | "
            "grep -E '(Starting|Finished|Failed to start) spark-switch@' | cut -d' ' -f1"
        )
        times = [float(word) for word in out.split()]
        return list(zip(times[::2], times[1::2], strict=True))

    def boots(self) -> list[str]:
        """Return the serve units that the next boot starts."""
        out = self.run(
            "ls /etc/systemd/system/multi-user.target.wants 2>/dev/null | grep '^spark-serve@' || :"
        )
        return out.split()

    def boot_id(self) -> str:
        """Return what tells this boot from others: systemd's start, for the kernel is not its own.

        The number counts from the start of the machine that the guests run on.
        """
        return self.run("systemctl show --property=UserspaceTimestampMonotonic --value")

    def wait_for_another_boot(self, before: str, *, seconds: float = 60) -> None:
        """Wait until the guest runs another boot than this one.

        Raises:
            TimeoutError: it never did.
        """
        self.wait(
            "now=$(systemctl show --property=UserspaceTimestampMonotonic --value) && "
            f'test "${{now:-{before}}}" != {before}',
            seconds=seconds,
        )

    def reboot(self, *, seconds: float = 60) -> None:
        """Reboot in an orderly way; return when another boot runs.

        Asked for from outside: a login that asks is a session of its own, whose end the lab's
        systemd sometimes does not see (cgroups of version 1) and then waits 90 s for.
        """
        before = self.boot_id()
        lab("break", "reboot", self.name)
        self.wait_for_another_boot(before, seconds=seconds)

    def key(self) -> str:
        """Return the API key."""
        return self.run("cat /etc/spark/api-key")

    def argv(self) -> list[str]:
        """Return the running engine's command line, by the container engine's word."""
        name = self.run("docker ps --filter label=spark.release --format '{{.Names}}'")
        inspected = self.json(f"docker inspect {name}")[0]
        return [*inspected["Config"]["Entrypoint"], *inspected["Config"]["Cmd"]]

    def ask(self, prompt: str, *, model: str = "") -> tuple[int, Any]:
        """Ask through the gateway with curl; return the HTTP status and the body."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 200, "temperature": 0, "model": model or self.names()[0],
        }  # fmt: skip
        return self.call("POST", "/v1/chat/completions", body)

    def answers(self, prompt: str, expected: str) -> bool:
        """Return whether a right answer comes through the gateway."""
        status, body = self.ask(prompt)
        return status == 200 and expected in str(body)

    def metrics(self) -> str:
        """Return the running engine's own counters, from its socket."""
        return self.run(
            "curl -sS --unix-socket /run/spark/engines/main/engine.sock http://engine/metrics"
        )

    def names(self) -> list[str]:
        """Return the served model names."""
        _, body = self.call("GET", "/v1/models")
        return [entry["id"] for entry in body["data"]]

    def call(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, port: int = 8000
    ) -> tuple[int, Any]:
        """Call a gateway on the guest's loopback address; return HTTP status and body.

        Without ``key`` the host's own key is used, which curl reads from standard input, so that
        it stands in no argv and no log.
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
        """Wait until a command succeeds on the guest.

        Raises:
            TimeoutError: it never did.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                return self.run(command, timeout_s=20)
            except (RuntimeError, subprocess.TimeoutExpired):
                time.sleep(0.5)
        raise TimeoutError(f"{self.name}: {command!r} did not succeed within {seconds:.0f} s")


@dataclass
class Site:
    """A user's own repository with inventory and group_vars, outside the checkout."""

    root: Path
    hosts: list[str]
    choices: dict[str, Any] = field(default_factory=dict)
    checkout: Path = CHECKOUT  # whose code deploys

    def __post_init__(self) -> None:
        (self.root / "inventory").mkdir(parents=True, exist_ok=True)
        (self.root / "group_vars").mkdir(exist_ok=True)
        known_hosts = self.root / "known_hosts"
        shutil.copy(info()["ssh"]["known_hosts"], known_hosts)
        text = (self.checkout / "inventory/lab.py").read_text()
        for theirs, ours in {
            "str(_pathlib.Path(__file__).resolve().parent.parent)": str(self.checkout),
            '_lab["ssh"]["known_hosts"]': str(known_hosts),
        }.items():
            if theirs not in text:
                raise RuntimeError(f"inventory/lab.py no longer says {theirs}")
            text = text.replace(theirs, repr(ours))
        (self.root / "inventory/lab.py").write_text(text)
        self.choose()

    def choose(self, **settings: Any) -> None:
        """Write choices of this test over the lab's, as a user edits a file."""
        self.choices |= settings
        lab_settings = yaml.safe_load((self.checkout / "group_vars/lab.yml").read_text())
        merged = _merge(lab_settings, self.choices)
        (self.root / "group_vars/lab.yml").write_text(yaml.safe_dump(merged, sort_keys=False))

    def _limit(self, arguments: tuple[str, ...]) -> list[str]:
        """Keep to this site's hosts; the lab may have others."""
        if "--limit" in arguments:
            return []
        return [word for name in self.hosts for word in ("--limit", name)]

    def command(self, *arguments: str, deploy: str = "deploy.py") -> list[str]:
        """Return the command line a user types."""
        pyinfra = Path(sys.executable).with_name("pyinfra")
        return [
            str(pyinfra), str(self.root / "inventory/lab.py"), str(self.checkout / deploy),
            *arguments,
        ]  # fmt: skip

    def deploy(
        self, *arguments: str, dry: bool = False, deploy: str = "deploy.py",
        timeout_s: float = 900, env: dict[str, str] | None = None,
    ) -> Run:  # fmt: skip
        """Run pyinfra and read its JSON."""
        limit = self._limit(arguments)
        began = time.monotonic()
        process = subprocess.Popen(
            self.command(*limit, *arguments, "--dry" if dry else "-y", "--json", deploy=deploy),
            cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})},
        )  # fmt: skip
        out: list[str] = []
        # The document comes at the end, on standard output; what people read is on the other one.
        reader = threading.Thread(target=lambda: out.extend(process.stdout or ()))
        limiter = threading.Timer(timeout_s, process.kill)
        reader.start()
        limiter.start()
        try:
            stderr, silence = listened(process.stderr, began)  # type: ignore[arg-type]
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
        """Make a key login of a guest's password login, as one who has compared its host key."""
        about = next(guest for guest in info()["guests"] if guest["name"] == name)
        password, host_keys = self.root / "password", self.root / "host_keys"
        password.touch(mode=0o600)
        password.write_text(about["password"] + "\n")
        host_keys.write_text(f"{about['ip']} {about['host_key']}\n")
        given = {
            "SPARK_BOOTSTRAP_PASSWORD_FILE": str(password),
            "SPARK_BOOTSTRAP_HOST_KEYS_FILE": str(host_keys),
        }
        return self.deploy(deploy="deploys/bootstrap.py", env=given)

    def look_command(self, command: str, *arguments: str) -> list[str]:
        """Return the ``spark-deploy`` command line a user types; it only looks."""
        return [
            sys.executable, "-m", "spark_deploy", command, str(self.root / "inventory/lab.py"),
            *self._limit(arguments), *arguments,
        ]  # fmt: skip

    def look(
        self, command: str, *arguments: str, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a ``spark-deploy`` command and return what it said."""
        return subprocess.run(
            self.look_command(command, *arguments),
            capture_output=True, text=True, check=False, cwd=CHECKOUT, timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def tool(self, command: str, *arguments: str, timeout_s: float = 300) -> tuple[int, str]:
        """Run a ``spark-deploy`` command that acts on hosts; return exit code and both outputs."""
        done = self.look(command, *arguments, timeout_s=timeout_s)
        return done.returncode, done.stdout + done.stderr

    def start(self, *arguments: str, deploy: str = "deploy.py") -> subprocess.Popen[str]:
        """Start pyinfra and leave it running; its lines arrive on ``stdout``."""
        limit = self._limit(arguments)
        return subprocess.Popen(
            self.command(*limit, *arguments, "-y", deploy=deploy),
            cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def guest_named(name: str) -> Guest:
    """Return a guest that is up."""
    return next(Guest(name, one["ip"]) for one in info()["guests"] if one["name"] == name)


def kill(process: subprocess.Popen[str]) -> None:
    """End a controller the hard way: no handler of its runs."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


def _merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: _merge(base.get(key), value) for key, value in over.items()}}
    return over


def environment(checkout: Path) -> dict[str, str]:
    """Return the variables that make Python import from a checkout instead of what is installed."""
    return {"PYTHONPATH": f"{checkout}:{checkout}/files/contract"}
