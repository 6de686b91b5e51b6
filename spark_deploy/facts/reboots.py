"""What a host was rebooted for, so that no reboot is tried twice for a cause it did not cure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from pyinfra.api.facts import FactBase


class RebootedFor(FactBase[str]):
    """The reason of the last reboot of ours that is still pending; empty when there is none."""

    default = str

    def command(self, path: str) -> str:
        return f"cat {shlex.quote(path)} 2>/dev/null || true"

    def process(self, output: Iterable[str]) -> str:
        return "\n".join(output).strip()
