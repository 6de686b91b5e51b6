"""The one password of a run: asked once, kept in memory, shown nowhere."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from spark_deploy.errors import SettingsError
from spark_deploy.inventory.contact.host_keys import Endpoint

PASSWORD_FILE_VARIABLE = "SPARK_BOOTSTRAP_PASSWORD_FILE"


def refuse_prompt(prompt: str) -> NoReturn:
    """Fail instead of pyinfra's prompt for a sudo password, which pyinfra puts into an argv."""
    raise SettingsError.one("sudo", "asks for a password", "run deploys/bootstrap.py once")


class Password(str):
    """Text that pyinfra's and paramiko's debug output shows as stars."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class Asked:
    """The one password of a run: asked when a host first needs it, then remembered."""

    def __init__(self, ask: Callable[[str], str] = getpass.getpass):
        self._ask = ask
        self._password: Password | None = None

    def password_of(self, endpoints: Sequence[Endpoint]) -> str:
        """Return the password; the question names the first hosts that need it."""
        if self._password is None:
            self._password = Password(_password_of(endpoints, self._ask))
        return self._password


def _password_of(endpoints: Sequence[Endpoint], ask: Callable[[str], str]) -> str:
    file = os.environ.get(PASSWORD_FILE_VARIABLE)
    if file:
        try:
            text = Path(file).expanduser().read_text().split("\n")[0]
        except OSError as error:
            raise SettingsError.one(
                PASSWORD_FILE_VARIABLE, f"{file}: {error.strerror}", "name a readable file"
            ) from error
    elif sys.stdin.isatty():
        users = ", ".join(sorted({endpoint.user or getpass.getuser() for endpoint in endpoints}))
        names = ", ".join(endpoint.host for endpoint in endpoints)
        text = ask(f"password of {users} on {names} (for login and sudo, asked once): ")
    else:
        raise SettingsError.one(
            "password",
            f"{', '.join(e.host for e in endpoints)} asks for one and nobody is there to give it",
            f"run in a terminal, or set {PASSWORD_FILE_VARIABLE} to a file that holds it",
        )
    if not text:
        raise SettingsError.one("password", "is empty", "run again and type it")
    return text
