"""Variants of guests: images of hosts in use, before the first deploy.

A directory of ``lab/variants`` has ``variant.yml``, ``files`` (copied over the guest's root) and
``owner.sh`` (run once after the first boot).
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lab import archive, packages, rootfs
from lab.content import cached, content_key
from lab.distribution import Distribution
from lab.errors import LabError
from lab.paths import LabPaths
from lab.shell import run

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


_OWNER_SCRIPT = "usr/lib/labstub/owner.sh"

_OWNER_UNIT = f"""\
[Unit]
Description=Changes by the host's owner (virtual lab)
After=multi-user.target docker.service nginx.service
ConditionPathExists=!/{OWNER_DONE}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -eu /{_OWNER_SCRIPT}
ExecStart=/bin/touch /{OWNER_DONE}

[Install]
WantedBy=multi-user.target
"""


def build_base(paths: LabPaths, machine: Distribution, variant: Variant) -> Path:
    distribution = _distribution(machine, variant)
    tree = rootfs.bootstrap(paths, distribution)
    preinstalled = [packages.build_stub(paths, name) for name in packages.PREINSTALLED_STUBS]
    stubs = [packages.build_stub(paths, name) for name in variant.stand_ins]
    unpacked = [packages.build_stub(paths, name) for name in variant.unpacked]
    offered = packages.download(paths, distribution, tree, more=_more(machine, variant))
    known = archive.of_variant(variant.name)
    debs = [*offered.glob("*.deb"), *preinstalled, *stubs, *unpacked]
    archive.publish(paths, known, debs, distribution.deb_arch)
    key = content_key(
        rootfs.base_place(paths, tree, preinstalled).name, offered.name,
        [deb.parent.name for deb in (*stubs, *unpacked)],
        trees=[variant.directory, Path(__file__)],
    )  # fmt: skip

    def make(target: Path) -> None:
        plain = rootfs.base(paths, tree, preinstalled)
        run(["cp", "-a", "--reflink=auto", plain, target])
        newer = variant.newer.packages if variant.newer else ()
        _install(paths, known, target, [*variant.packages, *newer, *variant.stand_ins])
        _unpack(target, unpacked)
        _copy_files(target, variant)

    return cached(paths.cache / f"variant-{variant.name}-{key}", make)


def _distribution(machine: Distribution, variant: Variant) -> Distribution:
    if variant.release is None:
        return machine
    if machine.os_id != "debian":
        raise LabError(
            f"variant {variant.name}", f"needs a Debian mirror, not {machine.mirror}",
            "choose a variant without a release",
        )  # fmt: skip
    codename, version = variant.release.codename, variant.release.version
    return replace(machine, codename=codename, version=version)


def _more(machine: Distribution, variant: Variant) -> packages.More:
    suites = [variant.release.codename] if variant.release else []
    words = list(variant.packages)
    if variant.newer:
        suites = [*(suites or [machine.codename]), variant.newer.suite]
        words += [f"{name}/{variant.newer.suite}" for name in variant.newer.packages]
    return packages.More(tuple(words), tuple(suites))


def _install(paths: LabPaths, known: archive.Archive, target: Path, wanted: Sequence[str]) -> None:
    inbox = target / "mnt"
    source = target / "etc/apt/sources.list.d/lab-install.list"
    source.write_text(f"deb [trusted=yes] file:/mnt {known.suite} main\n")
    with _mounted(paths.apt / known.directory, inbox), _no_service_starts(target):
        run(["chroot", target, "apt-get", "-q", "update"])
        options = ["-q", "-y", "--no-install-recommends"]
        run(["chroot", target, "apt-get", *options, "install", *wanted])
    source.unlink()
    for lists in (target / "var/lib/apt/lists").glob("*_*"):
        lists.unlink()


@contextmanager
def _mounted(source: Path, point: Path) -> Iterator[None]:
    run(["mount", "--bind", "-o", "ro", source, point])
    try:
        yield
    finally:
        run(["umount", point])


@contextmanager
def _no_service_starts(target: Path) -> Iterator[None]:
    policy = target / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def _unpack(target: Path, debs: Sequence[Path]) -> None:
    """Unpack packages without configuring them, like an interrupted update."""
    for deb in debs:
        shutil.copy(deb, target / "root" / deb.name)
        run(["chroot", target, "dpkg", "--unpack", f"/root/{deb.name}"])
        (target / "root" / deb.name).unlink()


def _copy_files(target: Path, variant: Variant) -> None:
    files = variant.directory / "files"
    if files.exists():
        run(["cp", "-r", "--remove-destination", "--no-preserve=ownership", f"{files}/.", target])
    if variant.locale:
        charset = variant.locale.partition(".")[2]
        name = variant.locale.partition(".")[0]
        run(["chroot", target, "localedef", "-i", name, "-f", charset, variant.locale])
    if variant.cloned_host_key:
        run(["chroot", target, "ssh-keygen", "-A"])
    for unit in variant.units:
        run(["chroot", target, "systemctl", "enable", unit])
    owner = variant.directory / "owner.sh"
    if owner.exists():
        shutil.copy(owner, target / _OWNER_SCRIPT)
        (target / "etc/systemd/system/lab-owner.service").write_text(_OWNER_UNIT)
        run(["chroot", target, "systemctl", "enable", "lab-owner.service"])
