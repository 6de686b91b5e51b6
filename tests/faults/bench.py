"""A guest with the host tools and the stub engine, without a deploy; tests write its releases."""

import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_deploy.hosts.payload import LAUNCHER
from tests.labkit import CHECKOUT, Guest, info
from tests.receipts import source_receipt

GATEWAY = {
    "schema_version": 1, "service": "main", "expose": "loopback", "port": 8000, "tls": None,
    "max_body_bytes": 1 << 20, "max_requests_per_s": None, "key_path": "/etc/spark/api-key",
}  # fmt: skip
TOOLS = "/usr/local/lib/spark"
NO_GPU = {"schema_version": 1, "key": {}, "docker_arguments": [], "gpu": "none"}
SPARK_HOST = f"{TOOLS}/current/bin/spark-host"
FAULT, LASTING = "/run/spark/engines/main/stub-fault", "/run/spark/stub-fault"
A, B, C = (f"main-{digit * 12}" for digit in "abc")


def release_data(name: str, stub: str, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "schema_version": 1, "name": name, "service": "main", "model": "lab-stub",
        "digest": name.rpartition("-")[2].ljust(64, "0"), "profile": "v2", "names": ["main-model"],
        "image": {"tag": stub, "digest_label": None, "base": stub, "plugin": ""},
        "tree": {"path": "/srv/spark/models/stub", "digest": "d" * 64},
        "engine": {
            "argv": [
                "/model", "--served-model-name", "main-model", "--uds", "/run/spark/engine.sock",
                "--max-model-len", "4096",
                "--speculative-config", '{"method":"mtp","num_speculative_tokens":2}',
            ],
            "env": {"STUB_LOAD_S": "0.5"}, "docker_args": ["--network", "none"], "user": "root",
            "mounts": [
                {"source": "/srv/spark/models/stub", "target": "/model", "read_only": True}
            ],
            "max_sequences": 1, "kv_cache_bytes": None,
        },
        "memory": {"needed_bytes": 1 << 28, "wait_s": 10, "floor_bytes": 1 << 27},
        "timeouts": {"start_s": 20, "stop_s": 5, "drain_s": 5},
        "check": {
            "timeout_s": 3, "max_model_len": 4096,
            "questions": [
                {"prompt": "What is the capital of France?", "expect": "Paris", "max_tokens": 32},
                {"prompt": "What is 7823 * 4519?", "expect": "35352137", "max_tokens": 32},
            ],
            "copy": ["zq-81/Kappa"], "repeat": True,
            "tool_call": False, "reasoning": False, "conversation": False, "image": False,
            "needle": None, "prefix": None, "bench": None, "portable": False,
            "acceptance_floor": 0.5, "metrics_required": {},
            "log_required": ["GPU KV cache size"], "log_forbidden": ["setting cudagraph_mode="],
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
    guest: Guest
    image: str

    def run(self, command: str, **words: Any) -> str:
        return self.guest.run(command, **words)

    def write(self, path: str, text: str) -> None:
        self.run(f"mkdir -p $(dirname {path}) && cat > {path} <<'END'\n{text}\nEND")

    def release(self, name: str, **changes: Any) -> None:
        data = release_data(name, self.image, **changes)
        self.write("/etc/spark/gateway/main.json", json.dumps(GATEWAY))
        self.write(f"/etc/spark/releases/{name}/release.json", json.dumps(data))
        self.write(
            f"/etc/systemd/system/spark-serve@{name}.service.d/50-release.conf",
            "[Unit]\nStartLimitIntervalSec=300\nStartLimitBurst=3\n[Service]\nRestartSec=2\n"
            "TimeoutStartSec=120\nTimeoutStopSec=60\n"
            f"ExecStartPre=-/bin/cp {LASTING} {FAULT}",
        )
        self.run("systemctl daemon-reload")

    def start_switch(self, name: str) -> None:
        self.run(
            f"systemctl reset-failed 'spark-s*@{name}.service'; "
            f"systemctl start --no-block spark-switch@{name}"
        )

    def switch(self, name: str, seconds: float = 90) -> dict[str, Any]:
        self.start_switch(name)
        return self.wait_for_result(name, seconds)

    def wait_for_result(self, name: str, seconds: float = 90) -> dict[str, Any]:
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
        result: dict[str, Any] = self.guest.json(f"cat /var/lib/spark/switch/{name}.json")
        return result

    def wait_for_phase(self, name: str, phase: str, seconds: int = 30) -> None:
        path = f"/var/lib/spark/switch/{name}.json"
        self.run(
            f"end=$(($(date +%s) + {seconds})); "
            f'until grep -qs \'"phase": "{phase}"\' {path} && '
            f'grep -qs \'"state": "running"\' {path}; do '
            "[ $(date +%s) -lt $end ] || exit 1; sleep 0.05; done"
        )

    def serve_proven(self, name: str = A, **changes: Any) -> None:
        self.wipe()
        self.release(name, **changes)
        self.assert_switches(name)

    def assert_switches(self, name: str) -> dict[str, Any]:
        result = self.switch(name)
        assert result["state"] == "switched", result
        self.assert_serves(name)
        return result

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.guest.json(f"{SPARK_HOST} status")
        return status

    def release_status(self, name: str) -> dict[str, Any]:
        [release] = [entry for entry in self.status()["releases"] if entry["name"] == name]
        return dict(release)

    def assert_serves(self, name: str) -> None:
        unit = f"spark-serve@{name}.service"
        shown = self.run(
            "systemctl list-units --plain --no-legend --state=active 'spark-serve@*' | "
            "cut -d' ' -f1 | xargs echo active; "
            "ls /etc/systemd/system/multi-user.target.wants | grep ^spark-serve@ | "
            "xargs echo boots; "
            "docker ps -a --format '{{.Names}}' | xargs echo containers; "
            f"echo run $(systemctl show -p InvocationID --value {unit}); "
            f"cat /var/lib/spark/proofs/{name}.json"
        )
        active, boots, containers, run, proof = shown.split("\n", 4)
        assert (active, boots) == (f"active {unit}", f"boots {unit}"), shown
        assert containers == f"containers spark-{name}"
        assert json.loads(proof)["ok"]
        assert f"run {json.loads(proof)['invocation_id']}" == run
        assert self.answers()

    def answers(self) -> bool:
        status, body = self.guest.call(
            "POST",
            "/v1/chat/completions",
            {"model": "main-model", "messages": [{"role": "user", "content": "What is 6*7?"}]},
        )
        return status == 200 and body["choices"][0]["message"]["content"] == "42"

    def wipe(self) -> None:
        self.run(
            "systemctl stop 'spark-switch@*' 'spark-serve@*' 'spark-watch@*' 'spark-gateway@*'; "
            "docker ps -aq | xargs -r docker rm -f >/dev/null; "
            "systemctl reset-failed 'spark-*'; "
            "rm -rf /etc/spark /etc/systemd/system/spark-*@*.service.d /run/spark "
            "/etc/systemd/system/multi-user.target.wants/spark-* "
            "/var/lib/spark/proofs /var/lib/spark/switch /var/lib/spark/good "
            "/var/lib/spark/stopped /var/lib/spark/events /var/lib/spark/requests "
            "/var/lib/spark/rollback; systemctl daemon-reload"
        )

    def memory_bytes(self, field: str) -> int:
        return int(self.run(f"awk '/^{field}:/ {{print $2}}' /proc/meminfo")) * 1024

    def block_systemctl(self, pattern: str) -> None:
        self._replace_systemctl(pattern, "while [ -e /run/bench ]; do sleep 0.1; done")
        self.write(
            "/etc/systemd/system/spark-switch@.service.d/bench.conf",
            "[Service]\nEnvironment=PATH=/run/bench:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        self.run("systemctl daemon-reload")

    def fail_systemctl(self, pattern: str, error: str) -> None:
        self._replace_systemctl(pattern, f'echo "{error}" >&2; exit 1')

    def _replace_systemctl(self, pattern: str, instead: str) -> None:
        words = pattern.replace(" ", "\\ ")
        self.write(
            "/run/bench/next",
            f'#!/bin/sh\ncase "$*" in *{words}*) {instead};; esac\nexec /usr/bin/systemctl "$@"',
        )
        self.run("chmod 755 /run/bench/next; mv /run/bench/next /run/bench/systemctl")

    def unblock_systemctl(self) -> None:
        self.run("rm -rf /run/bench /etc/systemd/system/spark-switch@.service.d; "
                 "systemctl daemon-reload")  # fmt: skip

    def start_long_request(self, *, stream: bool = False, running: int = 1) -> str:
        body = {
            "model": "main-model",
            "stream": stream,
            "messages": [{"role": "user", "content": "Repeat exactly: " + "abcd" * 400}],
        }
        path = f"/run/long-{stream}"
        self.write(f"{path}.json", json.dumps(body))
        self.write(
            f"{path}.sh",
            f'curl -sSiN -m 60 -H "Authorization: Bearer $(cat /etc/spark/api-key)" '
            f"-d @{path}.json http://127.0.0.1:8000/v1/chat/completions; echo; echo rc=$?",
        )
        self.run(f"systemd-run -q sh -c 'sh {path}.sh > {path}.out 2>&1'")
        self.guest.wait(
            "curl -s --unix-socket /run/spark/engines/main/engine.sock http://x/metrics | "
            f"grep -q 'num_requests_running.* {running}.0'"
        )
        return f"{path}.out"

    def power_cut(self) -> None:
        self.guest.power_cut()
        self.guest.wait("systemctl is-active docker", seconds=60)


def install(guest: Guest) -> Bench:
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
        f"cat > {SPARK_HOST} <<'END'\n{LAUNCHER}END\nchmod 755 {SPARK_HOST} && "
        f"cp {TOOLS}/current/units/*.service {TOOLS}/current/units/*.target /etc/systemd/system/ "
        f"&& mkdir -p /etc/sysusers.d && "
        f"cp {TOOLS}/current/units/spark-sysusers.conf /etc/sysusers.d/spark.conf && "
        "systemd-sysusers /etc/sysusers.d/spark.conf && systemctl daemon-reload && "
        f"docker pull -q {image} && mkdir -p /srv/spark/models/stub && "
        f"echo '{source_receipt('d' * 64)}' > /srv/spark/models/stub/receipt.json && "
        "mkdir -p /var/lib/spark/receipts && "
        f"echo '{json.dumps(NO_GPU)}' > /var/lib/spark/receipts/gpu-container.json",
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
