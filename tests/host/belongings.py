"""What belongs to the owner of a host, as ordinary tools show it: written down, and compared.

``find``, ``sha256sum``, ``systemctl``, ``dpkg-query``, ``docker`` and ``ss`` do the looking; no
code of the product takes part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Where owners keep their work. What is new there is ours or a package's; what was there stays.
PLACES = (
    "/etc /home /root /srv /opt /usr/local /data /var/spool/cron /var/mail /var/lib/docker/volumes"
)

# The only files of before that a deploy may change, and why.
OURS_TO_CHANGE = {
    r"/etc/docker/daemon\.json": "merged; its owner's keys are compared by themselves",
    r"/etc/(passwd|group|gshadow|shadow|subuid|subgid)-?": "accounts of services are added",
    r"/etc/ld\.so\.cache": "made anew by packages",
    r"/etc/(rc\d|init)\.d/.*": "links made by packages",
    r"/home/spark/\.ssh/authorized_keys": "bootstrap adds our key",
    r"/etc/mailcap": "made anew by packages",
    r"/var/lib/docker/volumes/metadata\.db": "docker's own index, written whenever it starts",
}
# Suspend and hibernate: a server that sleeps cannot be woken over the net.
OURS_TO_MASK = re.compile(r"(sleep|suspend|hibernate|hybrid-sleep|suspend-then-hibernate)\.target")

_FILES = f"find {PLACES} -xdev -type f -print0 2>/dev/null | xargs -0 sha256sum"
_MODES = f"find {PLACES} -xdev ! -type d -printf '%p  %y%m %U:%G %l\\n' 2>/dev/null || :"
_CONTAINERS = 'ids=$(docker ps -aq --no-trunc); [ -z "$ids" ] || docker inspect $ids'
# containerd takes another port of the loopback address each time.
_SOCKETS = (
    "ss -Hltnp | grep -v containerd | sed 's/pid=[0-9]*,fd=[0-9]*//g' | awk '{print $4, $6}' "
    "| sort -u"
)


@dataclass(frozen=True)
class Belongings:
    """One look at a host."""

    files: dict[str, str]
    enabled: dict[str, str]
    running: dict[str, str]
    packages: dict[str, str]
    containers: dict[str, Any]
    images: dict[str, str]
    sockets: set[str]
    accounts: set[str]
    daemon: dict[str, Any]

    @property
    def counts(self) -> dict[str, int]:
        """How many of each kind there are."""
        return {
            name: len(getattr(self, name))
            for name in ("files", "enabled", "packages", "containers", "images", "sockets")
        }


def look(run: Callable[[str], str], units: tuple[str, ...]) -> Belongings:
    """Look at a host through ``run``, a shell as root."""
    contents = {line[66:]: line[:64] for line in run(_FILES).splitlines()}
    modes = (line.partition("  ") for line in run(_MODES).splitlines())
    enabled = (
        line.split() for line in run("systemctl list-unit-files --plain --no-legend").splitlines()
    )
    # The drop-in that guarantees memory to logins is ours.
    states = (f"systemctl show -p ActiveState,FragmentPath,DropInPaths {unit} | "
              "sed 's,[^ =]*/50-spark.conf,,'" for unit in units)  # fmt: skip
    packages = run("dpkg-query -W -f '${Package}:${Architecture} ${Version}\\n'").splitlines()
    images = run(
        "docker images --no-trunc --format '{{.Repository}}:{{.Tag}} {{.ID}}'"
    ).splitlines()
    return Belongings(
        files={path: f"{mode} {contents.get(path, '')}" for path, _, mode in modes},
        enabled={words[0]: words[1] for words in enabled},
        running={unit: run(asked) for unit, asked in zip(units, states, strict=True)},
        packages=dict(line.split(" ", 1) for line in packages),
        containers={one["Name"]: _container(one) for one in json.loads(run(_CONTAINERS) or "[]")},
        images=dict(line.split(" ", 1) for line in images),
        sockets=set(run(_SOCKETS).splitlines()),
        accounts=set(run("getent passwd").splitlines()) | set(run("getent group").splitlines()),
        daemon=json.loads(run("cat /etc/docker/daemon.json 2>/dev/null || :") or "{}"),
    )


def _container(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": one["Id"],
        "image": one["Image"],
        "state": one["State"]["Status"],
        "started": one["State"]["StartedAt"],
        "config": one["Config"],
        "host": {k: v for k, v in one["HostConfig"].items() if k != "MaskedPaths"},
        "mounts": one["Mounts"],
    }


def changes(before: Belongings, after: Belongings, *, rebooted: bool = False) -> list[str]:
    """List what was there before and is not, or not as it was."""
    found = [f"file {path}: {was} is {after.files.get(path)}" for path, was in before.files.items()
             if after.files.get(path) != was and not _may_change(path)]  # fmt: skip
    found += _lost("enablement of", before.enabled, after.enabled, OURS_TO_MASK)
    found += _lost("unit", before.running, after.running)
    found += _lost("package", before.packages, after.packages)
    found += _lost("image", before.images, after.images)
    for name, was in before.containers.items():
        now = after.containers.get(name, {})
        expected = _booted(was) if rebooted else was
        found += [f"container {name}: {key} was {value}, is {now.get(key)}"
                  for key, value in expected.items() if now.get(key) != value]  # fmt: skip
    found += [f"nobody listens as {line}" for line in before.sockets - after.sockets]
    found += [f"account {line}" for line in before.accounts - after.accounts]
    found += [f"daemon.json: {key}" for key, value in before.daemon.items()
              if not _within(value, after.daemon.get(key))]  # fmt: skip
    return found


def _booted(container: dict[str, Any]) -> dict[str, Any]:
    """Return what a container is after a boot: docker brings back who asks for ``always``."""
    always = container["host"]["RestartPolicy"]["Name"] == "always"
    kept = {key: value for key, value in container.items() if key != "started"}
    return {**kept, "state": "running"} if always else kept


def _may_change(path: str) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in OURS_TO_CHANGE)


def _lost(
    what: str, before: dict[str, str], after: dict[str, str], ours: re.Pattern[str] | None = None
) -> list[str]:
    return [
        f"{what} {name}: {was!r} is {after.get(name)!r}"
        for name, was in before.items()
        if after.get(name) != was and not (ours and ours.fullmatch(name))
    ]


def _within(old: Any, new: Any) -> bool:
    """Return whether everything of ``old`` is still in ``new``."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(_within(value, new.get(key)) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return all(item in new for item in old)
    return bool(old == new)
