"""Names on a host: units, releases, trees and images. Most end in twelve digits of a digest."""

from __future__ import annotations

import re
from dataclasses import dataclass

COMMIT = "[0-9a-f]{40}"  # of git; also of a file as git counts it
SHA256 = "[0-9a-f]{64}"
DIGEST12 = "[0-9a-f]{12}"  # the beginning of a SHA256, in names


# The service every host has; others may stand beside it.
MAIN_SERVICE = "main"

UNITS_DIR = "/etc/systemd/system"
BOOT_LINKS = f"{UNITS_DIR}/multi-user.target.wants"


@dataclass(frozen=True, slots=True)
class Template:
    """A template unit such as ``spark-serve@.service``."""

    name: str
    kind: str = "service"

    def of(self, instance: str) -> str:
        """Return the unit of one instance; ``*`` stands for all of them."""
        return f"{self.name}@{instance}.{self.kind}"

    def instance(self, unit: str) -> str:
        """Return the instance in the name of a unit of this template."""
        return unit.removeprefix(f"{self.name}@").removesuffix(f".{self.kind}")


SERVE = Template("spark-serve")  # of a release: its engine
SWITCH = Template("spark-switch")  # of a release: the change to it
WATCH = Template("spark-watch")  # of a release: who looks after its engine
GATEWAY = Template("spark-gateway")  # of a service: its nginx
HOURS = Template("spark-hours", "timer")  # of a release: times at which it is changed to
RETURN = Template("spark-return")  # of a service: its start after a stop for a while
RETURN_TIMER = Template("spark-return", "timer")
JOB = Template("spark-job")  # of the first twelve digits of a job's digest
PREPARE = Template("spark-prepare", "target")  # of a release: all of its jobs
SHARE = Template("spark-share")  # lends files to peers
SHARE_UNIT = SHARE.of("trees")
DAILY_TIMER = "spark-daily.timer"
DAILY_STAMP = f"/var/lib/systemd/timers/stamp-{DAILY_TIMER}"  # systemd's, of its last run
DAILY_LINK = f"{UNITS_DIR}/timers.target.wants/{DAILY_TIMER}"


def drop_in_dir(unit: str) -> str:
    """Return the directory of what is said of one unit beside its template."""
    return f"{UNITS_DIR}/{unit}.d"


def mount_unit(path: str) -> str:
    """Return the unit that mounts something at a path, as ``systemd-escape --path`` names it."""
    escaped = (
        "-" if letter == "/" else letter if _PLAIN.match(letter) else f"\\x{ord(letter):02x}"
        for letter in path.strip("/")
    )
    return f"{''.join(escaped)}.mount"


_PLAIN = re.compile(r"[A-Za-z0-9_.:]")
RELEASE_NAME = re.compile(rf"^(?P<service>[a-z0-9][a-z0-9-]*)-{DIGEST12}\Z")
# Trees we made: only what carries an identity is ours to move or to remove.
TREE_NAME = re.compile(rf"^.+-{DIGEST12}\Z")
CACHE_NAME = re.compile(rf"^{DIGEST12}-mtp\d+\Z")

# Of containers that we run.
RELEASE_LABEL = "spark.release"
SERVICE_LABEL = "spark.service"
# Of images that we build: the digest of what went into them.
DIGEST_LABEL = "spark.digest"
IMAGE_NAME = "spark-vllm"


def release_name(service: str, digest: str) -> str:
    """Return the name of a release, which is the instance of all of its units."""
    return f"{service}-{digest[:12]}"


def cache_name(base: str, drafts: int) -> str:
    """Return the name of the folder of compile caches for a pinned base image."""
    return f"{base.rpartition(':')[2][:12]}-mtp{drafts}"
