"""A folder that acts as a host, with stub engines."""

import errno
import json
import os
import pwd
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_contract.documents import to_json
from spark_contract.gateway import Gateway
from spark_contract.paths import Paths
from spark_contract.records import GpuProof, Proof
from spark_contract.release import Release
from spark_host.check import runner
from spark_host.engine.client import Engine, EngineError
from spark_host.records import boot
from spark_host.system import host as system

REPOSITORY = Path(__file__).resolve().parents[3]
RELEASE = "main-0123456789ab"
STUB_DIR = REPOSITORY / "lab" / "stub_engine"


def release_data(name: str = RELEASE, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "schema_version": 1, "name": name, "service": "main", "model": "lab-stub",
        "digest": name.rpartition("-")[2].ljust(64, "0"), "profile": "v2",
        "names": ["main-model", "alias"],
        "image": {
            "tag": "spark-vllm:stub", "digest_label": None, "base": "spark-vllm:stub", "plugin": ""
        },
        "tree": {"path": "/srv/spark/models/x", "digest": "d" * 64},
        "engine": {
            "argv": [
                "/model",
                *("--served-model-name", "main-model", "alias"),
                *("--uds", "/run/spark/engine.sock"),
                *("--max-model-len", "4096"),
                *("--enable-auto-tool-choice", "--reasoning-parser", "qwen3"),
                "--enable-prefix-caching",
                *("--speculative-config", '{"method":"mtp","num_speculative_tokens":2}'),
            ],
            "env": {"STUB_LOG": "spark plugin is on"}, "mounts": [], "docker_args": [],
            "user": pwd.getpwuid(os.geteuid()).pw_name, "max_sequences": 1, "kv_cache_bytes": None,
        },
        "memory": {"needed_bytes": 1, "wait_s": 1, "floor_bytes": 1},
        "timeouts": {"start_s": 3, "stop_s": 2, "drain_s": 2},
        "check": {
            "timeout_s": 6, "max_model_len": 4096,
            "questions": [
                {"prompt": "What is the capital of France?", "expect": "Paris", "max_tokens": 32},
                {"prompt": "What is 7823 * 4519?", "expect": "^35352137$", "max_tokens": 32},
            ],
            "copy": ["zq-81/Kappa_π", "a b  c"],
            "tool_call": True, "reasoning": True, "repeat": True, "conversation": True,
            "image": True, "needle": {"context_tokens": 500}, "prefix": {"block_tokens": 100},
            "acceptance_floor": 0.5, "bench": None, "portable": False,
            "log_required": ["spark plugin is on", r"GPU KV cache size: [\d,]+ tokens"],
            "log_forbidden": ["setting cudagraph_mode="],
            "metrics_required": {
                "vllm:cache_config_info": {"cache_dtype": "auto"},
                "vllm:generation_tokens_total": 1,
            },
        },
        "watch": {"stall_s": 1, "interval_s": 0.1, "hot_celsius": None},
    }  # fmt: skip
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            data[section][key] = value
        else:
            data[section] = value
    return data


def job_data(digest12: str, proof: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "schema_version": 1, "digest": digest12.ljust(64, "0"), "kind": "fetch",
        "title": f"job {digest12}", "argv": ["true"], "env": {}, "proof": proof,
        "total_bytes": None, "after": [], **changes,
    }  # fmt: skip


@dataclass
class Host:
    paths: Paths
    program: Path
    engines: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def here(self) -> system.Host:
        return system.Host(self.paths)

    def gateway(self, **changes: Any) -> Gateway:
        data = {
            "schema_version": 1, "service": "main", "expose": "loopback", "port": 18080,
            "max_body_bytes": 4096, "max_requests_per_s": None, "key_path": "/etc/spark/api-key",
            "tls": None, "user": "nobody", **changes,
        }  # fmt: skip
        path = self.paths.gateway_settings("main")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))
        return system.load_gateway("main", self.paths)

    def proven_gpu(self, *arguments: str) -> None:
        self.paths.gpu_receipt.parent.mkdir(parents=True, exist_ok=True)
        self.paths.gpu_receipt.write_text(to_json(GpuProof({}, arguments, "GPU 0")))

    def release(self, name: str = RELEASE, **changes: Any) -> Release:
        if not self.paths.gateway_settings("main").exists():
            self.gateway()
        if not self.paths.gpu_receipt.exists():
            self.proven_gpu("--runtime=nvidia")
        folder = self.paths.releases / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "release.json").write_text(json.dumps(release_data(name, **changes)))
        return system.load_release(name, self.paths)

    @property
    def log(self) -> Path:
        return self.paths.root / "engine.log"

    def start(self, release: Release, fault: str = "", **environment: str) -> Engine:
        socket = self.paths.engine_socket(release.service)
        socket.parent.mkdir(parents=True, exist_ok=True)
        argv = [str(socket) if "engine.sock" in word else word for word in release.engine.argv]
        self.engines.append(
            subprocess.Popen(
                [str(self.program), "serve", *argv],
                stdout=self.log.open("wb"),
                stderr=subprocess.STDOUT,
                env={**release.engine.env, "STUB_FAULT": fault, **environment},
            )
        )
        return Engine(socket)

    def serving(self, fault: str = "", **values: Any) -> Release:
        """Start an engine of a release; names in capitals are environment variables."""
        environment = {name: value for name, value in values.items() if name.isupper()}
        release = self.release(**{n: v for n, v in values.items() if n not in environment})
        self.started(release, fault, **environment)
        return release

    def started(self, release: Release, fault: str = "", **environment: str) -> Engine:
        engine = self.start(release, fault, STUB_LOAD_S="0", **environment)
        wait_until(lambda: answers(engine), "the stub engine listens")
        return engine


def answers(engine: Engine) -> bool:
    try:
        return engine.get("/health").status > 0
    except EngineError:
        return False


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fail_without_space(path: Path, *_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def connect_when_listening(port: int) -> socket.socket:
    def connect() -> socket.socket | None:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), 1)
        return None

    connection: socket.socket = wait_until(connect, f"a process listens on port {port}")
    return connection


def write_certificate(paths: Paths, stem: str = "main", days: int = 9) -> dict[str, str]:
    tls = {kind: f"/etc/spark/gateway/{stem}.{kind}" for kind in ("certificate", "key")}
    certificate, key = (paths.below(path) for path in tls.values())
    certificate.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=x", "-addext", "subjectAltName=DNS:spark.example.org",
         "-keyout", key, "-out", certificate, "-days", str(days)],
        check=True, capture_output=True,
    )  # fmt: skip
    return tls


def wait_until(condition: Callable[[], Any], event: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {event}"
        time.sleep(0.02)


def check(host: Host, release: Release, level: str = "deep", run: str = "run-1") -> Proof:
    return runner.check(release, host.here, level, print, invocation_id=run)


def check_at_start(host: Host, release: Release) -> Proof:
    return runner.check(release, host.here, "quick", print, "run-1", at_start=True)


def stored_proof(host: Host, release: Release) -> Proof:
    stored = boot.read_proof(release.name, host.here)
    assert stored is not None
    return stored


def failed(result: Proof) -> dict[str, str]:
    return {finding.name: finding.detail for finding in result.failed}


def warned(result: Proof) -> dict[str, str]:
    return {finding.name: finding.detail for finding in result.warnings}
