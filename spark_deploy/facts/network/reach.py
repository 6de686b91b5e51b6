"""Whether packets of full size get from a host to the others of its cluster."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from spark_deploy.facts.reading import HostFact
from spark_deploy.facts.sections import script, whole

_HEADERS_BYTES = 28  # of IP and ICMP, which count towards the MTU
# Three packets, five seconds at most, all ways at once.
_PING = "ping -q -n -M do -c 3 -i 0.2 -W 1 -w 5"


class Reach(HostFact[dict[str, str]]):
    """For each address "yes", "no", or "unknown" where the host has no ping."""

    def command(self, ways: Sequence[tuple[str, str, int]]) -> str:
        """Return the script.

        Args:
            ways: interface, address of another member, and MTU of the interface.
        """
        asked = []
        for interface, address, mtu in ways:
            words = f"-I {shlex.quote(interface)} -s {mtu - _HEADERS_BYTES} {shlex.quote(address)}"
            ping = f"{_PING} {words} >/dev/null 2>&1"
            asked.append(f"{{ if {ping}; then echo {address} yes; else echo {address} no; fi; }} &")
        unknown = [f"echo {address} unknown" for _, address, _ in ways]
        return script(
            "echo '== reach'\nif command -v ping >/dev/null; then\n"
            + "\n".join([*asked, "wait"])
            + "\nelse\n"
            + "\n".join([*unknown, ":"])
            + "\nfi"
        )

    def process(self, output: Iterable[str]) -> dict[str, str]:
        """Read the section."""
        lines = (line.split() for line in whole(output).get("reach", ()))
        return {words[0]: words[1] for words in lines if len(words) == 2}
