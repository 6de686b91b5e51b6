"""Variants of guests, as data: what a host can look like before we have ever touched it.

A variant is a directory of ``lab/variants``: ``variant.yml`` says what is installed, ``files``
lies over the guest's root, ``owner.sh`` is what its owner typed once, after the first boot. A new
variant needs no line of code here or elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lab.errors import LabError

OWNER_DONE = "var/lib/labstub-owner"  # in the guest, when owner.sh has ended

DIRECTORY = Path(__file__).with_name("variants")


@dataclass(frozen=True, slots=True)
class Release:
    """A Debian release that is not the machine's own."""

    codename: str
    version: str


@dataclass(frozen=True, slots=True)
class Newer:
    """Packages taken from a later suite than the release."""

    suite: str
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant, as its ``variant.yml`` says."""

    name: str
    summary: str
    release: Release | None = None  # the machine's own where none is named
    newer: Newer | None = None
    packages: tuple[str, ...] = ()  # installed before the first boot
    stand_ins: tuple[str, ...] = ()  # of lab/stubs, installed
    unpacked: tuple[str, ...] = ()  # of lab/stubs, half installed: dpkg --audit names them
    units: tuple[str, ...] = ()  # of its files, enabled
    disks: tuple[str, ...] = ()  # further ones; ``data`` is mounted at ``/data``
    locale: str = ""
    proxied: bool = False  # its guests have no way to anything but the lab's proxy
    cloned_host_key: bool = False  # all guests of the variant show one SSH host key
    settings: Mapping[str, Any] = field(default_factory=dict)  # what its owner has to choose
    owned_units: tuple[str, ...] = ()  # whose state and files a deploy must leave as they were

    @property
    def directory(self) -> Path:
        return DIRECTORY / self.name


def names() -> list[str]:
    return sorted(path.parent.name for path in DIRECTORY.glob("*/variant.yml"))


def read(name: str) -> Variant:
    """Read a variant.

    Raises:
        LabError: there is none of that name, or its file says something unknown.
    """
    if name not in names():
        raise LabError(f"variant {name}", "does not exist", f"choose one of {', '.join(names())}")
    import yaml  # here, for a lab without variants needs Python alone

    said = yaml.safe_load((DIRECTORY / name / "variant.yml").read_text())
    unknown = set(said) - {one.name for one in fields(Variant)}
    if unknown:
        raise LabError(
            f"lab/variants/{name}/variant.yml", f"unknown: {', '.join(sorted(unknown))}",
            "see the fields in lab/variants.py",
        )  # fmt: skip
    for key, kind in (("release", Release), ("newer", Newer)):
        if key in said:
            said[key] = kind(**_tuples(said[key]))
    return Variant(name=name, **_tuples(said))


def _tuples(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in said.items()}
