"""Which files configure a host's interfaces, and which interfaces are part of another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spark_contract.host.fabric import NETPLAN_FILE, NETPLAN_TRIAL

from spark_deploy.facts.reading import HostFact
from spark_deploy.facts.sections import first, script, whole

_MOST_BYTES = 8192
_PROFILES = "/etc/NetworkManager/system-connections/*.nmconnection"
_SCRIPT = rf"""
echo '== there'; command -v netplan
echo '== tried'; ls {NETPLAN_TRIAL} 2>/dev/null
echo '== ours'; head -c {_MOST_BYTES} {NETPLAN_FILE} 2>/dev/null
echo; echo '== named'
# A profile that NetworkManager used before wins over netplan's new one.
for f in /lib/netplan/*.yaml /etc/netplan/*.yaml /run/netplan/*.yaml {_PROFILES}; do
  [ -f "$f" ] && [ "${{f##*/}}" != '{NETPLAN_FILE.rpartition("/")[2]}' ] || continue
  for n in /sys/class/net/*; do
    grep -qwF -- "${{n##*/}}" "$f" && echo "${{n##*/}} $f"
  done
done
echo '== below'
for n in /sys/class/net/*; do
  [ -e "$n/master" ] && echo "${{n##*/}} $(basename "$(readlink "$n/master")")"
done
"""


@dataclass(frozen=True, slots=True)
class Netplan:
    """What has to be known before an interface gets an address."""

    there: bool
    tried: bool  # a try of ours is under way
    ours: str  # the file we wrote; "" when there is none
    named: dict[str, str]  # interface: another file that configures it
    below: dict[str, str]  # interface: the bridge or bond it is part of


class NetplanFiles(HostFact[Netplan]):
    """Read as root: netplan's files are root's alone."""

    def command(self) -> str:
        """Return the script."""
        return script(_SCRIPT)

    def process(self, output: Iterable[str]) -> Netplan:
        """Read the sections."""
        found = whole(output)
        ours = "\n".join(found.get("ours", ())).rstrip("\n")
        return Netplan(
            there=bool(first(found, "there")),
            tried=bool(first(found, "tried")),
            ours=f"{ours}\n" if ours else "",
            named=_pairs(found.get("named", ())),
            below=_pairs(found.get("below", ())),
        )


def _pairs(lines: Iterable[str]) -> dict[str, str]:
    words = (line.split(maxsplit=1) for line in lines)
    return {one[0]: one[1] for one in words if len(one) == 2}
