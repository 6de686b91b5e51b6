"""Which packages were installed by us and may go: never one that was there, or that others need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spark_contract.work.keep import Before, Footprint, Thing

from spark_host.system import systemd
from spark_host.uninstall.before import installed, told

_ENGINE_STAYS = "others may use it by now; --data uninstall.engine=true removes it"
# Installed by us without being started; who starts it has found a use of his own.
_QUIET = {"nginx-light": "nginx.service"}


def things(wanted: Footprint, before: Before | None, in_the_way: Mapping[str, str]) -> list[Thing]:
    """List the packages of our settings that were not there before us.

    Args:
        wanted: their names.
        before: what was there; without it no package is known to be ours.
        in_the_way: by package, why it must stay whatever is asked for.
    """
    here, engine = set(installed()), (*wanted.engine_packages, *wanted.gpu_packages)
    asked = [name for name in (*wanted.packages, *engine) if name in here]
    if before is None:
        return [Thing("package", name, 0, "nobody noted whether it was there before")
                for name in asked]  # fmt: skip
    ours = [name for name in asked if name not in before.packages]
    found = []
    for name in ours:
        stays = _used(name) or _needed(name, ours, before)
        if name in engine:
            stays = stays or in_the_way.get(name) or ("" if wanted.engine else _ENGINE_STAYS)
        found.append(Thing("package", name, _size_bytes(name), stays))
    going = [thing.name for thing in found if not thing.stays]
    came_along = sorted((_removed(going, auto=True) - set(before.packages)) - set(going))
    alone = [name for name in came_along if not _outside([*going, *came_along], name)]
    return [*found, *(Thing("package", name, _size_bytes(name)) for name in alone)]


def remove(names: Iterable[str]) -> str:
    """Purge packages; return what went wrong."""
    listed = list(names)
    told("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "purge", *listed)
    left = set(listed) & set(installed())
    return f"packages still there: {', '.join(sorted(left))}" if left else ""


def _used(name: str) -> str:
    unit = _QUIET.get(name)
    if unit is None:
        return ""
    state = systemd.state(unit, "ActiveState", "UnitFileState")
    used = state.get("ActiveState") == "active" or state.get("UnitFileState") == "enabled"
    return f"{unit} is in use" if used else ""


def _needed(name: str, ours: list[str], before: Before) -> str:
    """Say which package that is not ours would go along."""
    others = _removed([name], auto=False) - set(ours)
    strangers = sorted(other for other in others if other in before.packages or _by_hand(other))
    return f"{', '.join(strangers)} needs it" if strangers else ""


def _outside(going: list[str], name: str) -> bool:
    """Whether something beside ``going`` would go with a package that came along."""
    return bool(_removed([name], auto=False) - set(going))


def _by_hand(name: str) -> bool:
    return told("apt-mark", "showmanual", name).strip() == name


def _removed(names: list[str], *, auto: bool) -> set[str]:
    """Ask apt what would go with ``names``; ``auto``: with what nothing needs any more."""
    if not names:
        return set()
    words = ["--auto-remove"] if auto else []
    lines = told("apt-get", "-s", "-q", *words, "purge", *names).splitlines()
    gone = (line.split() for line in lines if line.startswith(("Remv ", "Purg ")))
    return {words[1].partition(":")[0] for words in gone}


def _size_bytes(name: str) -> int:
    said = told("dpkg-query", "-W", "-f", "${Installed-Size}\n", name).split()
    return int(said[0]) * 1024 if said and said[0].isdigit() else 0
