"""Secrets of the controller: where they are, and reading them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema

from spark_deploy.config.documents import Text, form
from spark_deploy.config.errors import SettingsError

_Nothing = SkipJsonSchema[None]


@dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
    config=ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1, "maxProperties": 1}),
)
class SecretRef:
    """Where the controller reads a secret; exactly one key."""

    env: str | _Nothing = Field(
        default=None,
        json_schema_extra=form("^[A-Za-z_][A-Za-z0-9_]*$", "the name of a variable", "HF_TOKEN"),
    )
    """Name of a variable of the controller."""
    file: Text | _Nothing = None
    """Path on the controller; the first line is the secret."""
    command: Annotated[tuple[Text, ...], Field(min_length=1)] | _Nothing = None
    """Program and arguments run on the controller; the first line it prints is the secret."""

    @property
    def kind(self) -> str:
        """Return env, file, command, or generate when no key is given."""
        given = (key for key in ("env", "file", "command") if getattr(self, key) is not None)
        return next(given, "generate")

    @property
    def value(self) -> tuple[str, ...]:
        """Return the name, path or argument list."""
        name = self.env or self.file
        return (name,) if name else self.command or ()


GENERATED = SecretRef()
# A secret that the host may make itself.
OwnSecret = Annotated[
    SecretRef,
    BeforeValidator(
        lambda value: {} if value == "generate" else value,
        json_schema_input_type=Literal["generate"] | SecretRef,
    ),
    PlainSerializer(lambda ref: "generate" if ref == GENERATED else {ref.kind: ref.value}),
]


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
