"""Names of units, releases, trees and images, and files that change our units.

Most names end with 12 digits of a digest.
"""

import re
import shlex
from collections.abc import Iterable
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
    """Return the name of a path's mount unit, escaped like ``systemd-escape --path``."""
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


_PACKAGED = "/usr/lib/systemd/system"
# systemd.unit(5), by priority
_SEARCHED = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system.attached",
    "/run/systemd/system.attached",
    UNITS_DIR,
    "/run/systemd/system",
    "/run/systemd/generator",
    "/run/systemd/generator.late",
    "/usr/local/lib/systemd/system",
    _PACKAGED,
)
_UNIT = r"spark-(?:daily|gateway|hours|job|on-request|prepare|return|serve|share|switch|watch)"
# systemd-escape --path of /run/spark/engines/SERVICE
_MOUNT = r"run-spark-engines-[^/]+\.mount"
_UNIT_FILE = re.compile(rf"(?:{_UNIT}(?:@[^/]*)?\.(?:service|timer|target)|{_MOUNT})\Z")
# Drop-ins of a unit, of its template, of units with the same prefix, and of all units of a type.
_DROP_IN_DIR = re.compile(
    rf"(?:(?:(?:{_UNIT}|spark-(?:on-)?)(?:@[^/]*)?\.)?(?:service|timer|target)"
    rf"|{_MOUNT}|(?:run-(?:spark-(?:engines-)?)?\.)?mount)\.d\Z"
)
_OUR_DROP_IN = re.compile(
    rf"(?:{SERVE.name}|{WATCH.name})@[^/]+\.service\.d/50-(?:release|cluster)\.conf\Z"
    rf"|{JOB.name}@[^/]+\.service\.d/order\.conf\Z"
    rf"|{PREPARE.name}@[^/]+\.target\.d/[0-9a-f]{{12}}\.conf\Z"
)


def list_unit_files_command(root: str = "") -> str:
    """Return a shell command whose output ``find_unit_overrides`` reads."""
    directories = " ".join(shlex.quote(f"{root}{directory}") for directory in _SEARCHED)
    files = "-name 'spark-*' -o -name 'run-spark-*' -o -path '*.d/*.conf' -o -type l -name '*.d'"
    return (
        f"find {directories} -mindepth 1 -maxdepth 2 '(' {files} ')' "
        "-printf '%y %H/ %P\\n' 2>/dev/null || true"
    )


def find_unit_overrides(lines: Iterable[str], root: str = "") -> tuple[str, ...]:
    """Return unmanaged drop-ins, masks and unit files that change our units."""
    paths = []
    for line in lines:
        kind, _, location = line.partition(" ")
        directory, _, name = location.removeprefix(root).partition("/ ")
        if _is_override(directory, name, is_link=kind == "l"):
            paths.append(f"{directory}/{name}")
    return tuple(sorted(paths))


def _is_override(directory: str, name: str, *, is_link: bool) -> bool:
    """Return whether an entry of a unit directory is unmanaged and changes our units."""
    folder, _, drop_in = name.partition("/")
    affects_our_units = _DROP_IN_DIR.match(folder) is not None
    if drop_in.endswith(".conf") or (is_link and affects_our_units):
        if not affects_our_units:
            return False
        # Packages may add drop-ins for all units.
        if directory == _PACKAGED and not folder.startswith(("spark-", "run-spark-")):
            return False
        return is_link or directory != UNITS_DIR or not _OUR_DROP_IN.match(name)
    if not _UNIT_FILE.match(name):
        return False
    # A unit file for a single instance would replace one of our templates.
    is_instance = re.search("@[^.]", name) and not name.startswith(f"{HOURS.name}@")
    return is_link or directory != UNITS_DIR or bool(is_instance)
