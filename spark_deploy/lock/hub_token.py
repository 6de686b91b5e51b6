"""Read the hub token from ``hub.token`` or the user's Hugging Face login."""

from __future__ import annotations

import re

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.read_secret import read_secret
from spark_deploy.config.settings.sources import HubSettings

_TOKEN = re.compile(r"[!-~]{1,512}")


def read_hub_token(hub: HubSettings) -> str | None:
    if hub.token is None:
        return _read_login(hub.endpoint)
    token = read_secret(hub.token, setting="hub.token")
    if not _TOKEN.fullmatch(token):
        what = f"what the controller reads from {hub.token.kind} {hub.token.value[0]} is no token"
        raise SettingsError.one("hub.token", what, "use the token alone: one line without spaces")
    return token


def _read_login(endpoint: str) -> str | None:
    # The library takes a third of a second to import, and most runs download nothing.
    from huggingface_hub import constants, get_token

    # The login belongs to the hub that the library itself would send it to.
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or endpoint.rstrip("/") != constants.ENDPOINT:
        return None
    token = get_token()
    return token if token and _TOKEN.fullmatch(token) else None
