"""A guest whose gateway tests open and close, and how to knock at it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from tests.labkit import CHECKOUT, Guest, Site
from tests.runs import Run

NAME = os.environ.get("SPARK_GATEWAY_GUEST", "lab-12")
CONFIGURE = "Serve | Configure the gateway"
QUESTION = "What is 7823 * 4519?"
TAILNET = "100.101.102.103"
HERE = {"127.0.0.1", "[::1]"}  # where every gateway listens
# A piece each 50 ms: what a buffer would hold back is seen.
SLOW = {"STUB_PIECE_S": "0.05"}


@dataclass
class Place:
    """The guest and the user's repository."""

    site: Site
    guest: Guest

    def deploy(self, *arguments: str, **serve: Any) -> Run:
        """Deploy with these choices for the gateway, and no others of earlier tests."""
        self.site.choices["serve"] = {"address": self.guest.ip, **serve}
        self.site.choose()
        return self.site.deploy(*arguments)

    def exposed(self, **serve: Any) -> Run:
        """Deploy, and insist that only the gateway changed and nothing is left to change."""
        engine = self.engine()
        run = self.deploy(**serve)
        assert run.exit_code == 0, run.stderr[-3000:]
        assert run.changed in ([CONFIGURE], []), run.changed
        again = self.site.deploy()
        assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
        assert self.engine() == engine
        return run

    def engine(self) -> str:
        """Return what identifies the running engine: unit, run, process."""
        unit = self.guest.serving()[0]
        shown = self.guest.run(f"systemctl show -p InvocationID,MainPID,NRestarts {unit}")
        return f"{unit} {shown}"

    def listening(self) -> set[str]:
        """Return the addresses of the gateway's port, by ss."""
        out = self.guest.run("ss -Hltn 'sport = :8000' | awk '{print $4}'")
        return {line.rpartition(":")[0] for line in out.split()}

    def curl(self, url: str, *words: str, key: str | None = "", body: Any = None) -> str:
        """Ask from this machine; return the status, or curl's own error as ``curl N``.

        The host's own key is used for ``""`` and travels on standard input, none for ``None``.
        """
        secret = self.guest.key() if key == "" else key
        given = f'header = "Authorization: Bearer {secret}"' if secret else ""
        more = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body else []
        done = subprocess.run(
            ["curl", "-K", "-", "-sS", "-m", "30", "-o", "/dev/null", "-w", "%{http_code}",
             *words, *more, url],
            input=given, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout if done.returncode == 0 else f"curl {done.returncode}"

    def url(self, path: str = "/v1/models", scheme: str = "http") -> str:
        return f"{scheme}://{self.guest.ip}:8000{path}"

    def connect(self) -> dict[str, Any]:
        """Return what `spark-deploy connect` says."""
        out = subprocess.run(
            [sys.executable, "-m", "spark_deploy", "connect",
             str(self.site.root / "inventory/lab.py"), "--limit", NAME, "--json"],
            capture_output=True, text=True, check=True, cwd=CHECKOUT,
        ).stdout  # fmt: skip
        return json.loads(out)[0]


def stream(place: Place, key: str, letters: int = 200) -> subprocess.Popen[str]:
    """Begin a streamed answer of one piece for each four letters, read as it comes."""
    body = {
        "model": "lab-model", "stream": True,
        "messages": [{"role": "user", "content": "Repeat exactly: " + "abcd" * (letters // 4)}],
    }  # fmt: skip
    curl = subprocess.Popen(
        ["curl", "-K", "-", "-sSN", "-m", "90", "-H", "Content-Type: application/json",
         "-d", json.dumps(body), place.url("/v1/chat/completions")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    curl.stdin.write(f'header = "Authorization: Bearer {key}"\n')
    curl.stdin.close()
    curl.stdin = None
    return curl
