"""Names of our systemd units: one template for each kind, an instance for each release or job."""

from __future__ import annotations

from dataclasses import dataclass

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
JOB = Template("spark-job")  # of the first twelve digits of a job's digest
PREPARE = Template("spark-prepare", "target")  # of a release: all of its jobs


def drop_in_dir(unit: str) -> str:
    """Return the directory of what is said of one unit beside its template."""
    return f"{UNITS_DIR}/{unit}.d"
