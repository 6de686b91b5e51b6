"""The state of a host as comparable text: whether it serves, and every trace of a change."""

from tests.labkit import CHECKOUT, Guest

_IMAGES = "docker images --no-trunc --format '{{.Repository}} {{.Tag}} {{.Digest}} {{.ID}}' | sort"
_TOOLS = "/usr/local/lib/spark"
_DIRS = f"/etc/spark /etc/systemd/system /srv/spark/models /srv/spark/sources {_TOOLS}"
_EVERYTHING = f"/etc/spark /etc/systemd/system /srv/spark {_TOOLS} /var/lib/spark"
_NOT_COMPILED = "-not -path '*/__pycache__*'"


def state(guest: Guest) -> str:
    """Return a digest of contents, modes, boot and images, without times and records."""
    return guest.run(
        f"{{ find {_DIRS} {_NOT_COMPILED} -printf '%p %y %m %u %l\\n' | sort; "
        f"find {_DIRS} -type f {_NOT_COMPILED} -print0 | sort -z | xargs -0 sha256sum; {_IMAGES}; "
        "docker ps --format '{{.Names}} {{.Image}} {{.Command}}' --no-trunc; } | sha256sum"
    )


def footprint(guest: Guest) -> str:
    """Return all managed files with times, images, containers and unit runs.

    Folders are listed without times, because Python's compiled files change them.
    """
    return guest.run(
        f"find {_EVERYTHING} {_NOT_COMPILED} \\( -type d -printf '%p %m\\n' "
        "-o -printf '%p %y %m %s %T@ %i %n\\n' \\) | sort; "
        f"{_IMAGES}; docker ps --no-trunc -q; "
        "systemctl list-units --plain --no-legend --state=active 'spark-*@*.service' | "
        "cut -d' ' -f1 | xargs -r systemctl show -p Id -p InvocationID"
    )


# Units, packages, accounts, listeners, images and containers.
_AROUND = r"""
systemctl list-units --plain --no-legend --all 'spark-*' |
  awk '{print "unit", $1, $2, $3, $4}' | sort
systemctl list-unit-files --plain --no-legend | grep -v '^session-' |
  awk '{print "unit file", $1, $2}' | sort
dpkg-query -W -f 'package ${Package} ${Version} ${db:Status-Abbrev}\n'
apt-mark showmanual | sed 's/^/manual /'
getent passwd | sed 's/^/account /'; getent group | sed 's/^/group /'
ss -Hltnp | grep -v containerd | awk '{print "listens", $4}' | sort -u
docker images --no-trunc --format 'image {{.Repository}} {{.Tag}} {{.Digest}} {{.ID}}' | sort
docker ps -a --no-trunc --format 'container {{.Names}} {{.State}} {{.Image}} {{.Command}}' | sort
exit 0
"""


def digest(guest: Guest) -> list[str]:
    """Return everything that a deploy makes of a host, as lines; equal for equal hosts.

    It covers files, folders and links with mode, owner and content (``host_digest.py``), units,
    packages, accounts, listeners, images and containers, without the host's name and address.
    """
    program = (CHECKOUT / "tests/host_digest.py").read_text()
    own = f"{guest.name} {guest.ip}"
    files = guest.run(f"python3 - / {own} <<'END'\n{program}\nEND")
    return [*files.splitlines(), *guest.run(_AROUND).replace(guest.name, "OWN").splitlines()]


def difference(expected: list[str], actual: list[str]) -> list[str]:
    return [
        *(f"- {line}" for line in expected if line not in set(actual)),
        *(f"+ {line}" for line in actual if line not in set(expected)),
    ]
