"""What a host was rebooted for, so that no reboot is tried twice for a cause it did not cure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from pyinfra.api.facts import FactBase

BOOT_ID = "/proc/sys/kernel/random/boot_id"


class RebootedFor(FactBase[str]):
    """The reason of the last reboot of ours that is still pending; empty when there is none.

    It is written down before the reboot, under the id of the boot that was to end: while that one
    goes on, the reboot never came about, and nothing was tried.
    """

    default = str

    def command(self, path: str) -> str:
        marker = shlex.quote(path)
        return (
            f'[ -f {marker} ] && [ "$(head -n 1 {marker})" != "$(cat {BOOT_ID})" ] '
            f"&& tail -n +2 {marker} || true"
        )

    def process(self, output: Iterable[str]) -> str:
        return "\n".join(output).strip()
