"""A guest with only the host tools, the stub engine and hand-made releases on it.

What is proven here needs no deploy: releases are written by the test, the tools and systemd do
the rest. Looking goes through systemctl, docker and curl on the guest.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_deploy.hosts.payload import LAUNCHER
from tests.labkit import CHECKOUT, Guest, info, lab
from tests.receipts import source_receipt

GATEWAY = {
    "schema_version": 1,
    "service": "main",
    "expose": "loopback",
    "port": 8000,
    "max_body_bytes": 1 << 20,
    "max_requests_per_s": None,
    "key_path": "/etc/spark/api-key",
    "tls": None,
}
TOOLS = "/usr/local/lib/spark"
# No GPU is asked for.
UNASKED = {"schema_version": 1, "key": {}, "docker_arguments": [], "gpu": "none"}
HOST = f"{TOOLS}/current/bin/spark-host"
# What the running engine does wrong, and what each one after it.
FAULT, LASTING = "/run/spark/engines/main/stub-fault", "/run/spark/stub-fault"
A, B, C = (f"main-{digit * 12}" for digit in "abc")


def release_data(name: str, stub: str, **changes: Any) -> dict[str, Any]:
    """Return a release.json served by the stub; ``section__key=value`` changes one value."""
    data: dict[str, Any] = {
        "schema_version": 1,
        "name": name,
        "service": "main",
        "digest": name.rpartition("-")[2].ljust(64, "0"),
        "model": "lab-stub",
        "profile": "v2",
        "names": ["main-model"],
        "image": {"tag": stub, "digest_label": None, "base": stub, "plugin": ""},
        "tree": {"path": "/srv/spark/models/stub", "digest": "d" * 64},
        "engine": {
            "argv": [
                "/model", "--served-model-name", "main-model", "--uds", "/run/spark/engine.sock",
                "--max-model-len", "4096",
                "--speculative-config", '{"method":"mtp","num_speculative_tokens":2}',
            ],
            "env": {"STUB_LOAD_S": "0.5"},
            "mounts": [
                {"source": "/srv/spark/models/stub", "target": "/model", "read_only": True}
            ],
            "docker_args": ["--network", "none"],
            "user": "root",
            "max_sequences": 1,
            "kv_cache_bytes": None,
        },
        "memory": {"needed_bytes": 1 << 28, "wait_s": 10, "floor_bytes": 1 << 27},
        "timeouts": {"start_s": 20, "stop_s": 5, "drain_s": 5},
        "check": {
            "timeout_s": 3,
            "max_model_len": 4096,
            "questions": [
                {"prompt": "What is the capital of France?", "expect": "Paris", "max_tokens": 32},
                {"prompt": "What is 7823 * 4519?", "expect": "35352137", "max_tokens": 32},
            ],
            "copy": ["zq-81/Kappa"],
            "tool_call": False,
            "reasoning": False,
            "repeat": True,
            "conversation": False,
            "image": False,
            "needle": None,
            "prefix": None,
            "bench": None,
            "metrics_required": {},
            "acceptance_floor": 0.5,
            "log_required": ["GPU KV cache size"],
            "log_forbidden": ["setting cudagraph_mode="],
            "portable": False,
        },
        "watch": {"stall_s": 3, "interval_s": 0.5, "hot_celsius": None},
    }  # fmt: skip
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key == "env":
            data[section][key].update(value)
        elif key == "argv":
            data[section][key] += value
        elif key:
            data[section][key] = value
        else:
            data[section] = value
    return data


@dataclass
class Bench:
    """The guest and what a test does to it."""

    guest: Guest
    image: str

    def run(self, command: str, **words: Any) -> str:
        return self.guest.run(command, **words)

    def write(self, path: str, text: str) -> None:
        self.run(f"mkdir -p $(dirname {path}) && cat > {path} <<'END'\n{text}\nEND")

    def release(self, name: str, **changes: Any) -> str:
        """Put a release on the guest, as the deploy does."""
        data = release_data(name, self.image, **changes)
        self.write("/etc/spark/gateway/main.json", json.dumps(GATEWAY))
        self.write(f"/etc/spark/releases/{name}/release.json", json.dumps(data))
        self.write(
            f"/etc/systemd/system/spark-serve@{name}.service.d/50-release.conf",
            "[Unit]\nStartLimitIntervalSec=300\nStartLimitBurst=3\n[Service]\nRestartSec=2\n"
            "TimeoutStartSec=120\nTimeoutStopSec=60\n"
            # A start empties the engine's folder: a fault that is to last is put there again.
            f"ExecStartPre=-/bin/cp {LASTING} {FAULT}",
        )
        self.run("systemctl daemon-reload")
        return name

    def begin(self, name: str) -> None:
        """Ask systemd for the change and come back at once."""
        self.run(
            f"systemctl reset-failed 'spark-s*@{name}.service'; "
            f"systemctl start --no-block spark-switch@{name}",
        )

    def switch(self, name: str, seconds: float = 90) -> dict[str, Any]:
        """Change to a release and return the result file once the change has ended."""
        self.begin(name)
        return self.ended(name, seconds)

    def ended(self, name: str, seconds: float = 90) -> dict[str, Any]:
        """Wait on the guest until the change to a release is over; return its result."""
        unit = f"spark-switch@{name}.service"
        self.run(
            f"end=$(($(date +%s) + {seconds:.0f})); "
            f"until systemctl show -p ActiveState -p Job --value {unit} | tr '\\n' ' ' | "
            "grep -qE '^(inactive|failed) *$'; do "
            "[ $(date +%s) -lt $end ] || exit 1; sleep 0.1; done",
            timeout_s=seconds + 20,
        )
        return self.result(name)

    def result(self, name: str) -> dict[str, Any]:
        return self.guest.json(f"cat /var/lib/spark/switch/{name}.json")

    def at_phase(self, name: str, phase: str, seconds: int = 30) -> None:
        """Wait until the change to a release is in a phase."""
        path = f"/var/lib/spark/switch/{name}.json"
        self.run(
            f"end=$(($(date +%s) + {seconds})); "
            f'until grep -qs \'"phase": "{phase}"\' {path} && '
            f'grep -qs \'"state": "running"\' {path}; do '
            "[ $(date +%s) -lt $end ] || exit 1; sleep 0.05; done"
        )

    def good(self, name: str = A, **changes: Any) -> str:
        """Have exactly this release, sound and proven, serve the guest."""
        self.wipe()
        self.release(name, **changes)
        result = self.switch(name)
        assert result["state"] == "switched", result
        return name

    def told(self, name: str) -> dict[str, Any]:
        """Return what the host tools say of a release."""
        releases = self.guest.json(f"{HOST} status")["releases"]
        return next(one for one in releases if one["name"] == name)

    def serves(self, name: str) -> None:
        """Insist that a release runs alone, boots, is proven for this run, and answers."""
        unit = f"spark-serve@{name}.service"
        seen = self.run(
            "systemctl list-units --plain --no-legend --state=active 'spark-serve@*' | "
            "cut -d' ' -f1 | xargs echo active; "
            "ls /etc/systemd/system/multi-user.target.wants | grep ^spark-serve@ | "
            "xargs echo boots; "
            "docker ps -a --format '{{.Names}}' | xargs echo containers; "
            f"echo run $(systemctl show -p InvocationID --value {unit}); "
            f"cat /var/lib/spark/proofs/{name}.json"
        )
        active, boots, containers, run, proof = seen.split("\n", 4)
        assert (active, boots) == (f"active {unit}", f"boots {unit}"), seen
        assert containers == f"containers spark-{name}"
        assert json.loads(proof)["ok"]
        assert f"run {json.loads(proof)['invocation_id']}" == run
        assert self.answers()

    def answers(self) -> bool:
        """Return whether a right answer comes through the gateway."""
        status, body = self.guest.call(
            "POST",
            "/v1/chat/completions",
            {"model": "main-model", "messages": [{"role": "user", "content": "What is 6*7?"}]},
        )
        return status == 200 and body["choices"][0]["message"]["content"] == "42"

    def wipe(self) -> None:
        """Forget every release; keep tools, packages and image."""
        self.run(
            "systemctl stop 'spark-switch@*' 'spark-serve@*' 'spark-watch@*' 'spark-gateway@*'; "
            "docker ps -aq | xargs -r docker rm -f >/dev/null; "
            "systemctl reset-failed 'spark-*'; "
            "rm -rf /etc/spark /etc/systemd/system/spark-*@*.service.d /run/spark "
            "/etc/systemd/system/multi-user.target.wants/spark-* "
            "/var/lib/spark/proofs /var/lib/spark/switch /var/lib/spark/good "
            "/var/lib/spark/stopped /var/lib/spark/events /var/lib/spark/requests "
            "/var/lib/spark/rollback; systemctl daemon-reload",
        )

    def total_bytes(self) -> int:
        """Return the guest's whole memory."""
        return int(self.run("awk '/^MemTotal:/ {print $2}' /proc/meminfo")) * 1024

    def slow_systemctl(self, pattern: str | None) -> None:
        """Have the switch's systemctl wait at calls that match; ``None`` lets them all go on."""
        if pattern is None:
            self.run("rm -rf /run/bench /etc/systemd/system/spark-switch@.service.d; "
                     "systemctl daemon-reload")  # fmt: skip
            return
        words = pattern.replace(" ", "\\ ")
        self.write(
            "/run/bench/systemctl",
            f'#!/bin/sh\ncase "$*" in *{words}*) while [ -e /run/bench ]; do sleep 0.1; done;; '
            'esac\nexec /usr/bin/systemctl "$@"',
        )
        self.write(
            "/etc/systemd/system/spark-switch@.service.d/bench.conf",
            "[Service]\nEnvironment=PATH=/run/bench:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        self.run("chmod 755 /run/bench/systemctl; systemctl daemon-reload")

    def failing_systemctl(self, pattern: str, said: str) -> None:
        """Have calls that match fail from now on, but those that :meth:`slow_systemctl` holds."""
        words = pattern.replace(" ", "\\ ")
        self.write(
            "/run/bench/next",
            f'#!/bin/sh\ncase "$*" in *{words}*) echo "{said}" >&2; exit 1;; '
            'esac\nexec /usr/bin/systemctl "$@"',
        )
        self.run("chmod 755 /run/bench/next; mv /run/bench/next /run/bench/systemctl")

    def ask_for_long(self, *, stream: bool = False, running: int = 1) -> str:
        """Leave a request with the engine that takes longer than any drain.

        Returns:
            The file on the guest with all that the client gets, its exit code last.
        """
        body = {
            "model": "main-model",
            "stream": stream,
            "messages": [{"role": "user", "content": "Repeat exactly: " + "abcd" * 400}],
        }
        asked = f"/run/long-{stream}"
        self.write(f"{asked}.json", json.dumps(body))
        self.write(
            f"{asked}.sh",
            f'curl -sSiN -m 60 -H "Authorization: Bearer $(cat /etc/spark/api-key)" '
            f'-d @{asked}.json http://127.0.0.1:8000/v1/chat/completions; printf "\\nrc=%s\\n" $?',
        )
        self.run(f"systemd-run -q sh -c 'sh {asked}.sh > {asked}.out 2>&1'")
        self.guest.wait(
            "curl -s --unix-socket /run/spark/engines/main/engine.sock http://x/metrics | "
            f"grep -q 'num_requests_running.* {running}.0'"
        )
        return f"{asked}.out"

    def power_cut(self) -> None:
        """Cut the guest's power and switch it on again."""
        lab("break", "kill-guest", self.guest.name)
        lab("up", self.guest.name)
        self.guest.wait("systemctl is-active docker", seconds=60)


def install(guest: Guest) -> Bench:
    """Put packages, tools, units and the stub's image on a guest."""
    registry = info()["registry"]
    stub = info()["images"]["stub-engine"]
    image = f"{stub['repository']}@{stub['digest']}"
    docker = " ".join(info()["docker_packages"])
    guest.run(
        "mkdir -p /etc/docker && "
        f'echo \'{{"insecure-registries":["{registry}"]}}\' > /etc/docker/daemon.json && '
        "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install "
        f"--no-install-recommends {docker} nginx-light curl >/dev/null 2>&1; "
        "systemctl disable -q --now nginx; systemctl is-active docker",
        timeout_s=300,
    )
    guest.run(f"rm -rf {TOOLS}/bench")
    for part, where in (("host", ""), ("contract", ""), ("units", "/units")):
        _copy(guest, CHECKOUT / "files" / part, f"{TOOLS}/bench{where}")
    guest.run(
        f"ln -sfn bench {TOOLS}/current && mkdir -p {TOOLS}/bench/bin && "
        f"cat > {HOST} <<'END'\n{LAUNCHER}END\nchmod 755 {HOST} && "
        f"cp {TOOLS}/current/units/*.service {TOOLS}/current/units/*.target /etc/systemd/system/ "
        f"&& mkdir -p /etc/sysusers.d && "
        f"cp {TOOLS}/current/units/spark-sysusers.conf /etc/sysusers.d/spark.conf && "
        "systemd-sysusers /etc/sysusers.d/spark.conf && systemctl daemon-reload && "
        f"docker pull -q {image} && mkdir -p /srv/spark/models/stub && "
        f"echo '{source_receipt('d' * 64)}' > /srv/spark/models/stub/receipt.json && "
        # No GPU is asked for here: what a deploy proves for its containers is written by hand.
        "mkdir -p /var/lib/spark/receipts && "
        f"echo '{json.dumps(UNASKED)}' > /var/lib/spark/receipts/gpu-container.json",
        timeout_s=120,
    )
    return Bench(guest, image)


def _copy(guest: Guest, source: Path, target: str) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path in sorted(source.rglob("*")):
            if "__pycache__" not in path.parts:
                archive.add(path, str(path.relative_to(source)), recursive=False)
    ssh = info()["ssh"]
    subprocess.run(
        ["ssh", "-q", "-i", ssh["key"], "-o", f"UserKnownHostsFile={ssh['known_hosts']}",
         "-o", "BatchMode=yes", f"{ssh['user']}@{guest.ip}",
         f"sudo sh -c 'mkdir -p {target}; tar xz --no-same-owner -C {target}'"],
        input=out.getvalue(), check=True, timeout=60,
    )  # fmt: skip
