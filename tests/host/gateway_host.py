"""A guest whose gateway tests open and close, and requests to it from this machine."""

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from tests.labkit import Guest, Site
from tests.runs import Run

NAME = os.environ.get("SPARK_GATEWAY_GUEST", "lab-12")
CONFIGURE = "Serve | Configure the gateway"
QUESTION = "What is 7823 * 4519?"
TAILNET = "100.101.102.103"
LOOPBACK = {"127.0.0.1", "[::1]"}
SLOW = {"STUB_PIECE_S": "0.05"}


@dataclass
class GatewayHost:
    site: Site
    guest: Guest

    def deploy(self, *arguments: str, **serve: Any) -> Run:
        self.site.choices["serve"] = {"address": self.guest.ip, **serve}
        self.site.choose()
        return self.site.deploy(*arguments)

    def deploy_only_gateway(self, **serve: Any) -> Run:
        engine = self.engine()
        run = self.deploy(**serve).assert_succeeded()
        assert run.changed in ([CONFIGURE], []), run.changed
        self.site.deploy().assert_unchanged()
        assert self.engine() == engine
        return run

    def engine(self) -> str:
        unit = self.guest.serving()[0]
        shown = self.guest.run(f"systemctl show -p InvocationID,MainPID,NRestarts {unit}")
        return f"{unit} {shown}"

    def listening(self) -> set[str]:
        out = self.guest.run("ss -Hltn 'sport = :8000' | awk '{print $4}'")
        return {line.rpartition(":")[0] for line in out.split()}

    def curl(self, url: str, *arguments: str, key: str | None = "", body: Any = None) -> str:
        """Send a request from this machine; return the HTTP status, or ``curl N`` for its error.

        Without ``key`` the request has the host's key, with ``None`` it has none.
        """
        secret = self.guest.key() if key == "" else key
        header = f'header = "Authorization: Bearer {secret}"' if secret else ""
        more = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body else []
        result = subprocess.run(
            ["curl", "-K", "-", "-sS", "-m", "30", "-o", "/dev/null", "-w", "%{http_code}",
             *arguments, *more, url],
            input=header, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return result.stdout if result.returncode == 0 else f"curl {result.returncode}"

    def url(self, path: str = "/v1/models", scheme: str = "http") -> str:
        return f"{scheme}://{self.guest.ip}:8000{path}"

    def connect(self) -> dict[str, Any]:
        [values] = json.loads(self.site.cli("connect", "--json").stdout)
        return dict(values)


def stream(host: GatewayHost, key: str, letters: int = 200) -> subprocess.Popen[str]:
    body = {
        "model": "lab-model", "stream": True,
        "messages": [{"role": "user", "content": "Repeat exactly: " + "abcd" * (letters // 4)}],
    }  # fmt: skip
    curl = subprocess.Popen(
        ["curl", "-K", "-", "-sSN", "-m", "90", "-H", "Content-Type: application/json",
         "-d", json.dumps(body), host.url("/v1/chat/completions")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    curl.stdin.write(f'header = "Authorization: Bearer {key}"\n')
    curl.stdin.close()
    curl.stdin = None
    return curl
