"""The timers of a schedule on a host, and what its systemd thinks of times."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from spark_contract.host.units import HOURS, UNITS_DIR

from spark_deploy.facts.reading import HostFact


class Timers(HostFact[dict[str, bool]]):
    """Each timer of a schedule, with whether it runs and starts with the host."""

    default = dict

    def command(self) -> str:
        return (
            f'for path in {UNITS_DIR}/{HOURS.of("*")}; do [ -e "$path" ] || continue; '
            'name=$(basename "$path"); '
            'echo "$name $(systemctl is-active "$name") $(systemctl is-enabled "$name" 2>&1)"; done'
        )

    def process(self, output: Iterable[str]) -> dict[str, bool]:
        lines = (line.split() for line in output if line.strip())
        return {name: state == ["active", "enabled"] for name, *state in lines}


class Calendars(HostFact[str]):
    """Why the first of some calendar expressions is none; "" when all of them are."""

    default = str

    def command(self, times: Sequence[str]) -> str:
        words = " ".join(map(shlex.quote, times))
        return (
            f'for at in {words}; do systemd-analyze calendar "$at" >/dev/null 2>&1 '
            '|| { echo "$at"; break; }; done'
        )

    def process(self, output: Iterable[str]) -> str:
        found = "".join(output).strip()
        return f"{found!r} is no time that its systemd understands" if found else ""
