"""Names on a host: units, releases, trees and images. Most end with 12 digits of a digest."""

from __future__ import annotations

import re
from dataclasses import dataclass

COMMIT = "[0-9a-f]{40}"  # git commit or blob
SHA256 = "[0-9a-f]{64}"
DIGEST12 = "[0-9a-f]{12}"  # prefix of a SHA256, in names


MAIN_SERVICE = "main"

UNITS_DIR = "/etc/systemd/system"
BOOT_LINKS = f"{UNITS_DIR}/multi-user.target.wants"


@dataclass(frozen=True, slots=True)
class Template:
    name: str
    kind: str = "service"

    def unit(self, instance: str) -> str:
        return f"{self.name}@{instance}.{self.kind}"

    def instance(self, unit: str) -> str:
        return unit.removeprefix(f"{self.name}@").removesuffix(f".{self.kind}")


SERVE = Template("spark-serve")  # engine of a release
SWITCH = Template("spark-switch")  # rollout to a release
WATCH = Template("spark-watch")  # watchdog of a release
GATEWAY = Template("spark-gateway")  # nginx of a service
HOURS = Template("spark-hours", "timer")  # scheduled rollouts to a release
SCHEDULED_START = Template("spark-return")  # start of a service after a temporary stop
SCHEDULED_START_TIMER = Template("spark-return", "timer")
JOB = Template("spark-job")  # by digest12
PREPARE = Template("spark-prepare", "target")  # all jobs of a release
SHARE = Template("spark-share")  # serves files to peers
SHARE_UNIT = SHARE.unit("trees")
ON_REQUEST_UNIT = "spark-on-request.service"
DAILY_TIMER = "spark-daily.timer"
DAILY_STAMP = f"/var/lib/systemd/timers/stamp-{DAILY_TIMER}"  # written by systemd at each run
DAILY_LINK = f"{UNITS_DIR}/timers.target.wants/{DAILY_TIMER}"


def drop_in_dir(unit: str) -> str:
    return f"{UNITS_DIR}/{unit}.d"


def mount_unit(path: str) -> str:
    """Return the name of a path's mount unit, escaped as by ``systemd-escape --path``."""
    escaped = re.sub(r"[^A-Za-z0-9_.:/]", lambda m: f"\\x{ord(m[0]):02x}", path.strip("/"))
    return f"{escaped.replace('/', '-')}.mount"


RELEASE_NAME = re.compile(rf"^(?P<service>[a-z0-9][a-z0-9-]*)-{DIGEST12}\Z")
# Names of built trees; only trees with such a name may be moved or removed.
TREE_NAME = re.compile(rf"^.+-{DIGEST12}\Z")
CACHE_NAME = re.compile(rf"^{DIGEST12}-mtp\d+\Z")

# Labels of managed containers.
RELEASE_LABEL = "spark.release"
SERVICE_LABEL = "spark.service"
# Label of built images: digest of the inputs.
DIGEST_LABEL = "spark.digest"
IMAGE_NAME = "spark-vllm"


def release_name(service: str, digest: str) -> str:
    return f"{service}-{digest[:12]}"


def cache_name(base: str, drafts: int) -> str:
    return f"{base.rpartition(':')[2][:12]}-mtp{drafts}"
