"""The hub's token on a host: for gated repositories, while the settings name one."""

from __future__ import annotations

import re

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.host.paths import HUB_TOKEN

from spark_deploy.errors import SettingsError
from spark_deploy.managed import ManagedFile
from spark_deploy.operations.files import place, states_of
from spark_deploy.operations.host_errors import Commands, host_errors
from spark_deploy.settings.read_secret import read_secret
from spark_deploy.settings.secrets import SecretRef

_USABLE = re.compile(r"[!-~]{1,512}")


@operation()
@host_errors
def hub_token(token: SecretRef | None) -> Commands:
    """Have the token where systemd takes it from for the jobs that ask with it, or no token."""
    if token is None:
        if states_of([HUB_TOKEN]):
            yield StringCommand("rm", "-f", "--", HUB_TOKEN)
        else:
            host.noop("no token is wanted and none is there")
        return
    secret = read_secret(token, setting="hub.token")
    if not _USABLE.fullmatch(secret):
        what = f"what the controller reads from {token.kind} {token.value[0]} is not usable"
        raise SettingsError.one("hub.token", what, "use the token alone: one line without spaces")
    if not (yield from place((ManagedFile(HUB_TOKEN, f"{secret}\n".encode(), 0o600),))):
        host.noop("the token is there")
