"""State that belongs to the owner of a host, read with standard tools and compared."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Where owners keep files. A deploy may add files there, but must not change existing files.
PLACES = (
    "/etc /home /root /srv /opt /usr/local /data /var/spool/cron /var/mail /var/lib/docker/volumes"
)

# Exceptions, and why.
MAY_CHANGE = {
    r"/etc/docker/daemon\.json": "merged; the owner's keys are compared separately",
    r"/etc/(passwd|group|gshadow|shadow|subuid|subgid)-?": "accounts of services are added",
    r"/etc/ld\.so\.cache": "rebuilt by packages",
    r"/etc/(rc\d|init)\.d/.*": "links made by packages",
    r"/home/spark/\.ssh/authorized_keys": "bootstrap adds our key",
    r"/etc/mailcap": "rebuilt by packages",
    r"/var/lib/docker/volumes/metadata\.db": "Docker's index, written at every start",
}
# Suspend and hibernate: the network cannot wake a sleeping server.
MASKED = re.compile(r"(sleep|suspend|hibernate|hybrid-sleep|suspend-then-hibernate)\.target")

_FILES = f"find {PLACES} -xdev -type f -print0 2>/dev/null | xargs -0 sha256sum"
_MODES = f"find {PLACES} -xdev ! -type d -printf '%p  %y%m %U:%G %l\\n' 2>/dev/null || :"
_CONTAINERS = 'ids=$(docker ps -aq --no-trunc); [ -z "$ids" ] || docker inspect $ids'
# containerd uses a random port of the loopback address.
_SOCKETS = (
    "ss -Hltnp | grep -v containerd | sed 's/pid=[0-9]*,fd=[0-9]*//g' | awk '{print $4, $6}' "
    "| sort -u"
)


@dataclass(frozen=True)
class OwnedState:
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
        return {
            name: len(getattr(self, name))
            for name in ("files", "enabled", "packages", "containers", "images", "sockets")
        }


def read_state(run: Callable[[str], str], units: tuple[str, ...]) -> OwnedState:
    contents = {line[66:]: line[:64] for line in run(_FILES).splitlines()}
    modes = (line.partition("  ") for line in run(_MODES).splitlines())
    enabled = (
        line.split() for line in run("systemctl list-unit-files --plain --no-legend").splitlines()
    )
    states = (f"systemctl show -p ActiveState,FragmentPath,DropInPaths {unit} | "
              "sed 's,[^ =]*/50-spark.conf,,'" for unit in units)  # fmt: skip
    packages = run("dpkg-query -W -f '${Package}:${Architecture} ${Version}\\n'").splitlines()
    images = run(
        "docker images --no-trunc --format '{{.Repository}}:{{.Tag}} {{.ID}}'"
    ).splitlines()
    return OwnedState(
        files={path: f"{mode} {contents.get(path, '')}" for path, _, mode in modes},
        enabled={words[0]: words[1] for words in enabled},
        running={unit: run(command) for unit, command in zip(units, states, strict=True)},
        packages=dict(line.split(" ", 1) for line in packages),
        containers={
            shown["Name"]: _container(shown) for shown in json.loads(run(_CONTAINERS) or "[]")
        },
        images=dict(line.split(" ", 1) for line in images),
        sockets=set(run(_SOCKETS).splitlines()),
        accounts=set(run("getent passwd").splitlines()) | set(run("getent group").splitlines()),
        daemon=json.loads(run("cat /etc/docker/daemon.json 2>/dev/null || :") or "{}"),
    )


def _container(shown: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": shown["Id"],
        "image": shown["Image"],
        "state": shown["State"]["Status"],
        "started": shown["State"]["StartedAt"],
        "config": shown["Config"],
        "host": {k: v for k, v in shown["HostConfig"].items() if k != "MaskedPaths"},
        "mounts": shown["Mounts"],
    }


def list_changes(before: OwnedState, after: OwnedState, *, rebooted: bool = False) -> list[str]:
    lines = [f"file {path}: {old} is {after.files.get(path)}" for path, old in before.files.items()
             if after.files.get(path) != old and not _may_change(path)]  # fmt: skip
    lines += _differences("enablement of", before.enabled, after.enabled, MASKED)
    lines += _differences("unit", before.running, after.running)
    lines += _differences("package", before.packages, after.packages)
    lines += _differences("image", before.images, after.images)
    for name, old in before.containers.items():
        new = after.containers.get(name, {})
        expected = _after_boot(old) if rebooted else old
        lines += [f"container {name}: {key} was {value}, is {new.get(key)}"
                  for key, value in expected.items() if new.get(key) != value]  # fmt: skip
    lines += [f"no listener {line}" for line in before.sockets - after.sockets]
    lines += [f"account {line}" for line in before.accounts - after.accounts]
    lines += [f"daemon.json: {key}" for key, value in before.daemon.items()
              if not _contains(value, after.daemon.get(key))]  # fmt: skip
    return lines


def _after_boot(container: dict[str, Any]) -> dict[str, Any]:
    always = container["host"]["RestartPolicy"]["Name"] == "always"
    kept = {key: value for key, value in container.items() if key != "started"}
    return {**kept, "state": "running"} if always else kept


def _may_change(path: str) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in MAY_CHANGE)


def _differences(
    kind: str, before: dict[str, str], after: dict[str, str], ignored: re.Pattern[str] | None = None
) -> list[str]:
    return [
        f"{kind} {name}: {old!r} is {after.get(name)!r}"
        for name, old in before.items()
        if after.get(name) != old and not (ignored and ignored.fullmatch(name))
    ]


def _contains(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return all(_contains(value, new.get(key)) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return all(item in new for item in old)
    return bool(old == new)
