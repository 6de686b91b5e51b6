"""Read a secret on the controller: from the environment, a file or a command's output."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from spark_deploy.errors import SettingsError
from spark_deploy.settings.secrets import SecretRef

_TIMEOUT_S = 60


def read_secret(reference: SecretRef, *, setting: str) -> str:
    """Return the secret behind ``reference``; ``setting`` is named in errors, the secret never.

    Wrap the result in pyinfra's ``HiddenValue`` and send it on standard input only.
    """
    first = reference.value[0] if reference.value else ""
    if reference.kind == "env":
        text = os.environ.get(first)
        problem = None if text else f"the environment variable {first} is not set"
    elif reference.kind == "file":
        text, problem = _from_file(first)
    elif reference.kind == "command":
        text, problem = _from_command(reference.value)
    else:
        text, problem = None, "is made on the host, not read here"
    lines = (text or "").strip().splitlines()
    if problem or not lines:
        fix = "correct it; nothing was sent to a host"
        raise SettingsError.one(setting, problem or "the secret is empty", fix)
    return lines[0].strip()


def _from_file(path: str) -> tuple[str | None, str | None]:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8"), None
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{path} cannot be read ({type(error).__name__})"


def _from_command(argv: tuple[str, ...]) -> tuple[str | None, str | None]:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{argv[0]} cannot be run ({type(error).__name__})"
    if done.returncode:
        return None, f"{argv[0]} ended with exit status {done.returncode}"
    return done.stdout, None
