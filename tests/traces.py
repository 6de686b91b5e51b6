"""What is on a host, as text to compare: what makes it serve, and every trace of a change."""

from __future__ import annotations

from tests.labkit import Guest

_IMAGES = "docker images --no-trunc --format '{{.Repository}} {{.Tag}} {{.Digest}} {{.ID}}' | sort"
_TOOLS = "/usr/local/lib/spark"
_WHAT = f"/etc/spark /etc/systemd/system /srv/spark/models /srv/spark/sources {_TOOLS}"
_EVERYTHING = f"/etc/spark /etc/systemd/system /srv/spark {_TOOLS} /var/lib/spark"
# Python keeps what it compiled in folders beside its files.
_NOT_COMPILED = "-not -path '*/__pycache__*'"


def state(guest: Guest) -> str:
    """Return a digest of what makes the host serve as it does: contents, modes, boot, images.

    Times, proofs and records of changes are left out: they tell when, not what.
    """
    return guest.run(
        f"{{ find {_WHAT} {_NOT_COMPILED} -printf '%p %y %m %u %l\\n' | sort; "
        f"find {_WHAT} -type f {_NOT_COMPILED} -print0 | sort -z | xargs -0 sha256sum; {_IMAGES}; "
        "docker ps --format '{{.Names}} {{.Image}} {{.Command}}' --no-trunc; } | sha256sum"
    )


def footprint(guest: Guest) -> str:
    """Return everything of ours on the host, times of files included, and the runs of what is up.

    Folders have no times here: a program that Python compiles is no change.
    """
    return guest.run(
        f"find {_EVERYTHING} {_NOT_COMPILED} \\( -type d -printf '%p %m\\n' "
        "-o -printf '%p %y %m %s %T@ %i %n\\n' \\) | sort; "
        f"{_IMAGES}; docker ps --no-trunc -q; "
        "systemctl list-units --plain --no-legend --state=active 'spark-*@*.service' | "
        "cut -d' ' -f1 | xargs -r systemctl show -p Id -p InvocationID"
    )
