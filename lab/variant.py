"""Variants of guests: images of hosts in use, before the first deploy.

A directory of ``lab/variants`` has ``variant.yml``, ``files`` (copied over the guest's root) and
``owner.sh`` (run once after the first boot).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lab.errors import LabError

OWNER_DONE = "var/lib/labstub-owner"

DIRECTORY = Path(__file__).with_name("variants")


@dataclass(frozen=True, slots=True)
class Release:
    codename: str
    version: str


@dataclass(frozen=True, slots=True)
class Newer:
    suite: str
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    summary: str
    release: Release | None = None  # default: the machine's own
    newer: Newer | None = None
    packages: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()  # of lab/stubs, half installed: dpkg --audit names them
    units: tuple[str, ...] = ()
    disks: tuple[str, ...] = ()  # additional disks; ``data`` is mounted at ``/data``
    locale: str = ""
    proxied: bool = False  # guests reach only the lab's proxy
    cloned_host_key: bool = False  # all guests have the same SSH host key
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings required by the owner
    owned_units: tuple[str, ...] = ()  # a deploy must not change their state and files

    @property
    def directory(self) -> Path:
        return DIRECTORY / self.name


def names() -> list[str]:
    return sorted(path.parent.name for path in DIRECTORY.glob("*/variant.yml"))


def read(name: str) -> Variant:
    if name not in names():
        raise LabError(f"variant {name}", "does not exist", f"choose one of {', '.join(names())}")
    import yaml  # here, because a lab without variants needs no packages

    values = yaml.safe_load((DIRECTORY / name / "variant.yml").read_text())
    unknown = set(values) - {field_.name for field_ in fields(Variant)}
    if unknown:
        raise LabError(
            f"lab/variants/{name}/variant.yml", f"unknown: {', '.join(sorted(unknown))}",
            "see the fields in lab/variant.py",
        )  # fmt: skip
    for key, kind in (("release", Release), ("newer", Newer)):
        if key in values:
            values[key] = kind(**_tuples(values[key]))
    return Variant(name=name, **_tuples(values))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
