"""Where a host is reached, by its own account of the login."""

from __future__ import annotations

from collections.abc import Iterable

from spark_deploy.facts.reading import HostFact


class LoginAddress(HostFact[str]):
    """The host's address that this login goes to; "" where there was no SSH login.

    To be asked without sudo, which drops the variable.
    """

    default = str

    def command(self) -> str:
        return "printf '%s\\n' \"$SSH_CONNECTION\""

    def process(self, output: Iterable[str]) -> str:
        words = " ".join(output).split()
        return words[2] if len(words) == 4 else ""
