"""Where the host tools read and write.

``SPARK_ROOT`` puts everything below another directory: tests run the real code there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

RELEASES_DIR = "etc/spark/releases"
GATEWAY_DIR = "etc/spark/gateway"
STATE_DIR = "var/lib/spark"
RUN_DIR = "run/spark"


@dataclass(frozen=True, slots=True)
class Paths:
    """All paths, derived from one root."""

    root: Path

    @property
    def releases(self) -> Path:
        """One directory per release, each with its frozen ``release.json``."""
        return self.root / RELEASES_DIR

    @property
    def state(self) -> Path:
        """What survives a reboot: jobs, proofs, switch results, markers."""
        return self.root / STATE_DIR

    @property
    def run(self) -> Path:
        """What a reboot forgets: sockets, doors, locks."""
        return self.root / RUN_DIR

    @property
    def units(self) -> Path:
        """The unit directory systemd enables into."""
        return self.root / "etc/systemd/system"

    @property
    def tools(self) -> Path:
        """Installed tools; ``current`` points at the digest in use."""
        return self.root / "usr/local/lib/spark"

    def job(self, digest12: str) -> Path:
        """Return the directory of a job."""
        return self.state / "jobs" / digest12

    @property
    def gpu_receipt(self) -> Path:
        """Return the deploy's proof that a container sees the GPU."""
        return self.state / "receipts" / "gpu-container.json"

    def proof(self, release: str) -> Path:
        """Return the file of the last check of a release."""
        return self.state / "proofs" / f"{release}.json"

    def switch(self, release: str) -> Path:
        """Return the file of the last switch to a release."""
        return self.state / "switch" / f"{release}.json"

    def request(self, release: str) -> Path:
        """Return the file that says under which id the last switch was asked for."""
        return self.state / "requests" / f"{release}.json"

    def rollback(self, service: str) -> Path:
        """Return the record of a way back that was asked for or gone."""
        return self.state / "rollback" / f"{service}.json"

    def good(self, service: str) -> Path:
        """Return the record of the last proven releases of a service."""
        return self.state / "good" / f"{service}.json"

    def stopped(self, service: str) -> Path:
        """Return the marker of a service that a person stopped."""
        return self.state / "stopped" / f"{service}.json"

    def events(self, service: str) -> Path:
        """Return the file the watch writes its events to, one JSON object a line."""
        return self.state / "events" / f"{service}.jsonl"

    def service_run(self, service: str) -> Path:
        """Return the directory of a service's socket and door."""
        return self.run / service

    def door(self, service: str) -> Path:
        """Return the file whose existence lets requests through the gateway."""
        return self.service_run(service) / "open"

    def gateway_settings(self, service: str) -> Path:
        """Return the file that says where a service's gateway listens."""
        return self.root / GATEWAY_DIR / f"{service}.json"

    def gateway_run(self, service: str) -> Path:
        """Return the directory the gateway's configuration is rendered into."""
        return self.root / "run/spark-gateway" / service


def default_paths() -> Paths:
    """Return the paths below ``SPARK_ROOT``, or below ``/``."""
    return Paths(Path(os.environ.get("SPARK_ROOT", "/")))
