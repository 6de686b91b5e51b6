"""Read a secret on the controller: from the environment, a file or a command's output."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.secrets import SecretRef

_TIMEOUT_S = 60


def read_secret(reference: SecretRef, *, setting: str) -> str:
    """Return the secret behind ``reference``; ``setting`` is named in errors, the secret never.

    Wrap the result in pyinfra's ``HiddenValue`` and send it on standard input only.
    """
    fix = "correct the setting; no host was changed"
    try:
        text = _text_of(reference)
    except ValueError as error:
        raise SettingsError.one(setting, str(error), fix) from error
    lines = text.strip().splitlines()
    if not lines:
        raise SettingsError.one(setting, "the secret is empty", fix)
    return lines[0].strip()


def _text_of(reference: SecretRef) -> str:
    if reference.env:
        if not os.environ.get(reference.env):
            raise ValueError(f"the environment variable {reference.env} is not set")
        return os.environ[reference.env]
    if reference.file:
        try:
            return Path(reference.file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{reference.file} cannot be read ({type(error).__name__})") from None
    if reference.command:
        return _printed_by(reference.command)
    raise ValueError("is made on the host, not read here")


def _printed_by(argv: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise ValueError(f"{argv[0]} cannot be run ({type(error).__name__})") from None
    if done.returncode:
        raise ValueError(f"{argv[0]} failed with exit status {done.returncode}")
    return done.stdout
