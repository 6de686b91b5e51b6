"""How many requests the engines of a host compute, and how many wait, by their own count."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_contract.host.paths import engine_dir

from spark_deploy.facts.reading import HostFact

_COUNTED = re.compile(r"vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\d+(?:\.\d+)?)$")


@dataclass(frozen=True, slots=True)
class Count:
    """Requests at one moment."""

    running: int
    waiting: int


class Requests(HostFact[dict[str, Count]]):
    """Of each service whose engine answers."""

    default = dict

    def command(self, services: Sequence[str]) -> str:
        return "; ".join(
            f"echo {shlex.quote(f'== {name}')}; curl -s -m 5 --unix-socket "
            f"{shlex.quote(f'{engine_dir(name)}/engine.sock')} http://engine/metrics | "
            "grep '^vllm:num_requests_' || true"
            for name in services
        )

    def process(self, output: Iterable[str]) -> dict[str, Count]:
        found: dict[str, dict[str, int]] = {}
        name = ""
        for line in output:
            if line.startswith("== "):
                name = line.removeprefix("== ")
            elif counted := _COUNTED.match(line):
                of_service = found.setdefault(name, {})
                of_service[counted[1]] = of_service.get(counted[1], 0) + int(float(counted[2]))
        return {
            name: Count(one.get("running", 0), one.get("waiting", 0)) for name, one in found.items()
        }
