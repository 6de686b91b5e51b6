"""Paths on a host; ``Paths`` resolves them below another root."""

from dataclasses import dataclass
from pathlib import Path

from spark_contract.units import BOOT_LINKS, MAIN_SERVICE, UNITS_DIR

RECEIPT_NAME = "receipt.json"  # written last into a tree
CONFIG_DIR = "/etc/spark"
RELEASES_DIR = f"{CONFIG_DIR}/releases"
GATEWAY_DIR = f"{CONFIG_DIR}/gateway"
API_KEY = f"{CONFIG_DIR}/api-key"
PROXY = f"{CONFIG_DIR}/proxy.env"  # 0600, may contain a password; for jobs and docker
STATE_DIR = "/var/lib/spark"
JOBS_DIR = f"{STATE_DIR}/jobs"
PROOFS_DIR = f"{STATE_DIR}/proofs"
RECEIPTS_DIR = f"{STATE_DIR}/receipts"
SWITCH_DIR = f"{STATE_DIR}/switch"
DAILY = f"{STATE_DIR}/daily.json"
GPU_RECEIPT = f"{RECEIPTS_DIR}/gpu-container.json"
RUN_DIR = "/run/spark"
TOOLS_DIR = "/usr/local/lib/spark"
CURRENT_TOOLS = f"{TOOLS_DIR}/current"  # link to the installed digest
SITE = f"{TOOLS_DIR}/site"  # the builder's Python packages
QUANTIZER = f"{TOOLS_DIR}/quantizer"  # AutoRound with dependencies
SYSUSERS = "/etc/sysusers.d/spark.conf"  # creates the accounts below
GATEWAY_USER = "spark-gateway"
ENGINE_USER = "spark-engine"
# In the container, where the service's directory of ENGINES_DIR is mounted.
ENGINE_SOCKET = f"{RUN_DIR}/engine.sock"
ENGINES_DIR = f"{RUN_DIR}/engines"


def backup_path(path: str) -> str:
    return f"{path}.before-spark"


def job_dir(digest: str) -> str:
    return f"{JOBS_DIR}/{digest[:12]}"


def release_file(name: str) -> str:
    return f"{RELEASES_DIR}/{name}/release.json"


def engine_dir(service: str) -> str:
    return f"{ENGINES_DIR}/{service}"


def hub_token_file(digest: str) -> str:
    """Return the path of a job's hub token: mode 0600, removed when the job ends."""
    return f"{job_dir(digest)}/hub-token"


@dataclass(frozen=True, slots=True)
class Paths:
    root: Path

    def below(self, path: str | Path) -> Path:
        return self.root / str(path).lstrip("/")

    @property
    def releases(self) -> Path:
        return self.below(RELEASES_DIR)

    def release(self, name: str) -> Path:
        return self.below(release_file(name))

    @property
    def state(self) -> Path:
        return self.below(STATE_DIR)

    @property
    def run(self) -> Path:
        return self.below(RUN_DIR)

    @property
    def units(self) -> Path:
        return self.below(UNITS_DIR)

    @property
    def boot_links(self) -> Path:
        return self.below(BOOT_LINKS)

    @property
    def tools(self) -> Path:
        return self.below(TOOLS_DIR)

    def engine_lock(self, service: str) -> Path:
        name = "engine.lock" if service == MAIN_SERVICE else f"engine-{service}.lock"
        return self.run / name

    def job(self, digest12: str) -> Path:
        return self.below(job_dir(digest12))

    @property
    def gpu_receipt(self) -> Path:
        return self.below(GPU_RECEIPT)

    @property
    def daily(self) -> Path:
        return self.below(DAILY)

    def proof(self, release: str) -> Path:
        return self.below(PROOFS_DIR) / f"{release}.json"

    def compile_cache(self, release: str) -> Path:
        return self.state / "caches" / f"{release}.json"

    def answers(self, release: str) -> Path:
        return self.state / "answers" / f"{release}.json"

    def rollout(self, release: str) -> Path:
        return self.below(SWITCH_DIR) / f"{release}.json"

    def request(self, release: str) -> Path:
        return self.state / "requests" / f"{release}.json"

    def rollback(self, service: str) -> Path:
        return self.state / "rollback" / f"{service}.json"

    def known_good(self, service: str) -> Path:
        return self.state / "good" / f"{service}.json"

    def stopped(self, service: str) -> Path:
        return self.state / "stopped" / f"{service}.json"

    def events(self, service: str) -> Path:
        return self.state / "events" / f"{service}.jsonl"

    def service_run(self, service: str) -> Path:
        return self.run / service

    def engine_run(self, service: str) -> Path:
        return self.below(engine_dir(service))

    def engine_socket(self, service: str) -> Path:
        return self.engine_run(service) / Path(ENGINE_SOCKET).name

    def engine_environment(self, release: str) -> Path:
        return self.run / f"{release}.env"

    def traffic(self, service: str) -> Path:
        return self.service_run(service) / "open"

    def last_use(self, service: str) -> Path:
        """Return the file whose modification time is the time of the last known request."""
        return self.service_run(service) / "used"

    def rollout_lock(self, service: str) -> Path:
        return self.run / f"switch-{service}.lock"

    def stop_lock(self, service: str) -> Path:
        return self.run / f"stop-{service}.lock"

    def waiting_socket(self, service: str) -> Path:
        return self.root / "run/spark-on-request" / f"{service}.sock"

    def gateway_settings(self, service: str) -> Path:
        return self.below(GATEWAY_DIR) / f"{service}.json"

    def usage(self, service: str) -> Path:
        """Return the usage of named API keys, next to the gateway's log."""
        return self.state / "usage" / f"{service}.json"

    def gateway_run(self, service: str) -> Path:
        return self.root / "run/spark-gateway" / service

    def gateway_bodies(self, service: str) -> Path:
        return self.root / "var/cache/spark-gateway" / service
