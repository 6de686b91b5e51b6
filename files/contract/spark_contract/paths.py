"""Where things lie on a host; all of it can be put below another root."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spark_contract.units import BOOT_LINKS, MAIN_SERVICE, UNITS_DIR

RECEIPT_NAME = "receipt.json"  # written last into a tree, see ``work/receipts.py``
CONFIG_DIR = "/etc/spark"
RELEASES_DIR = f"{CONFIG_DIR}/releases"
GATEWAY_DIR = f"{CONFIG_DIR}/gateway"
API_KEY = f"{CONFIG_DIR}/api-key"
PROXY = f"{CONFIG_DIR}/proxy.env"  # 0600, it may hold a password; of jobs and of docker's daemon
STATE_DIR = "/var/lib/spark"
JOBS_DIR = f"{STATE_DIR}/jobs"
PROOFS_DIR = f"{STATE_DIR}/proofs"
RECEIPTS_DIR = f"{STATE_DIR}/receipts"
SWITCH_DIR = f"{STATE_DIR}/switch"
DAILY = f"{STATE_DIR}/daily.json"
GPU_RECEIPT = f"{RECEIPTS_DIR}/gpu-container.json"
RUN_DIR = "/run/spark"
TOOLS_DIR = "/usr/local/lib/spark"
CURRENT_TOOLS = f"{TOOLS_DIR}/current"  # a link to the digest in use
SITE = f"{TOOLS_DIR}/site"  # the builder's Python packages
QUANTISER = f"{TOOLS_DIR}/quantiser"  # AutoRound and what the engine's image lacks for it
SYSUSERS = "/etc/sysusers.d/spark.conf"  # makes these accounts
GATEWAY_USER = "spark-gateway"
ENGINE_USER = "spark-engine"
# Inside the engine's container, where the service's own directory of ENGINES_DIR is mounted.
ENGINE_SOCKET = f"{RUN_DIR}/engine.sock"
ENGINES_DIR = f"{RUN_DIR}/engines"


def kept_aside(path: str) -> str:
    """Return where a deploy keeps the file of somebody else that it found there."""
    return f"{path}.before-spark"


def job_dir(digest: str) -> str:
    """Return the directory of a job's documents; its unit has the same twelve digits."""
    return f"{JOBS_DIR}/{digest[:12]}"


def release_file(name: str) -> str:
    """Return where a release lies, frozen."""
    return f"{RELEASES_DIR}/{name}/release.json"


def engine_dir(service: str) -> str:
    """Return the directory in which a service's engine makes its socket."""
    return f"{ENGINES_DIR}/{service}"


def hub_token_file(digest: str) -> str:
    """Return where a job reads the hub's token: 0600, removed when the job ends."""
    return f"{job_dir(digest)}/hub-token"


@dataclass(frozen=True, slots=True)
class Paths:
    """All paths, derived from one root."""

    root: Path

    def below(self, path: str | Path) -> Path:
        """Return where an absolute path of a host lies below the root."""
        return self.root / str(path).lstrip("/")

    @property
    def releases(self) -> Path:
        """One directory per release, each with its frozen ``release.json``."""
        return self.below(RELEASES_DIR)

    def release(self, name: str) -> Path:
        """Return the frozen document of a release."""
        return self.below(release_file(name))

    @property
    def state(self) -> Path:
        """What survives a reboot: jobs, proofs, rollouts, markers."""
        return self.below(STATE_DIR)

    @property
    def run(self) -> Path:
        """What a reboot forgets: sockets, open traffic, locks."""
        return self.below(RUN_DIR)

    @property
    def units(self) -> Path:
        """The unit directory systemd enables into."""
        return self.below(UNITS_DIR)

    @property
    def boot_links(self) -> Path:
        """What systemd starts at boot: links named like the units they enable."""
        return self.below(BOOT_LINKS)

    @property
    def tools(self) -> Path:
        """Installed tools; ``current`` points at the digest in use."""
        return self.below(TOOLS_DIR)

    def engine_lock(self, service: str) -> Path:
        """Return what the running engine of a service holds."""
        name = "engine.lock" if service == MAIN_SERVICE else f"engine-{service}.lock"
        return self.run / name

    def job(self, digest12: str) -> Path:
        """Return the directory of a job."""
        return self.below(job_dir(digest12))

    @property
    def gpu_receipt(self) -> Path:
        """Return the deploy's proof that a container sees the GPU."""
        return self.below(GPU_RECEIPT)

    @property
    def daily(self) -> Path:
        """Return what the last daily look found."""
        return self.below(DAILY)

    def proof(self, release: str) -> Path:
        """Return the file of the last check of a release."""
        return self.below(PROOFS_DIR) / f"{release}.json"

    def compile_cache(self, release: str) -> Path:
        """Return the record of a release's compile cache."""
        return self.state / "caches" / f"{release}.json"

    def answers(self, release: str) -> Path:
        """Return what a release answered to its owner's prompts; only root reads it."""
        return self.state / "answers" / f"{release}.json"

    def rollout(self, release: str) -> Path:
        """Return the record of the last rollout of a release."""
        return self.below(SWITCH_DIR) / f"{release}.json"

    def request(self, release: str) -> Path:
        """Return the record of the id under which that rollout was asked for."""
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
        """Return the directory of what opens a service's traffic; only root writes there."""
        return self.run / service

    def engine_run(self, service: str) -> Path:
        """Return the directory of a service's socket; the engine may write there what it likes."""
        return self.below(engine_dir(service))

    def engine_socket(self, service: str) -> Path:
        """Return the socket on which a service's engine listens."""
        return self.engine_run(service) / Path(ENGINE_SOCKET).name

    def engine_environment(self, release: str) -> Path:
        """Return the file with the variables of a release's container, for root alone."""
        return self.run / f"{release}.env"

    def traffic(self, service: str) -> Path:
        """Return the file whose existence lets requests through the gateway."""
        return self.service_run(service) / "open"

    def gateway_settings(self, service: str) -> Path:
        """Return the file that says where a service's gateway listens."""
        return self.below(GATEWAY_DIR) / f"{service}.json"

    def gateway_run(self, service: str) -> Path:
        """Return the directory the gateway's configuration is rendered into."""
        return self.root / "run/spark-gateway" / service

    def gateway_bodies(self, service: str) -> Path:
        """Return where the gateway keeps the bodies of requests under way: on disk, not in /run."""
        return self.root / "var/cache/spark-gateway" / service
