"""Where a secret is on the controller, declared; nothing is read here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, PlainSerializer
from pydantic.json_schema import SkipJsonSchema

from spark_deploy.config.documents.declare import Text, form, setting

_Nothing = SkipJsonSchema[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    """Where the controller reads a secret; exactly one of the keys."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        json_schema_extra={"minProperties": 1, "maxProperties": 1}
    )

    env: str | _Nothing = setting(
        None,
        "Name of a variable of the controller.",
        **form("^[A-Za-z_][A-Za-z0-9_]*$", "the variable's name alone", "HF_TOKEN"),
    )
    file: Text | _Nothing = setting(None, "Path on the controller; the first line is the secret.")
    command: tuple[Text, ...] | _Nothing = setting(
        None,
        "Program and arguments run on the controller; the first line it prints is the secret.",
        minItems=1,
    )

    @property
    def kind(self) -> str:
        """Return env, file, command, or generate when no key is given."""
        given = (key for key in ("env", "file", "command") if getattr(self, key) is not None)
        return next(given, "generate")

    @property
    def value(self) -> tuple[str, ...]:
        """Return the name, path or argument list."""
        one = self.env or self.file
        return (one,) if one else self.command or ()


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
