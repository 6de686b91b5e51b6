"""Settings that refer to a secret on the controller, which is not read here."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema

from spark_deploy.config.documents import Text, text_schema

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
        json_schema_extra=text_schema(
            "^[A-Za-z_][A-Za-z0-9_]*$", "the name of a variable", "HF_TOKEN"
        ),
    )
    """Name of an environment variable on the controller."""
    file: Text | _Nothing = None
    """Path on the controller; the first line is the secret."""
    command: Annotated[tuple[Text, ...], Field(min_length=1)] | _Nothing = None
    """Program and arguments run on the controller; the first line it prints is the secret."""

    @property
    def kind(self) -> str:
        """``env``, ``file`` or ``command``; ``generate`` if no key is set."""
        given = (key for key in ("env", "file", "command") if getattr(self, key) is not None)
        return next(given, "generate")

    @property
    def value(self) -> tuple[str, ...]:
        name = self.env or self.file
        return (name,) if name else self.command or ()


GENERATED = SecretRef()
# A secret that the host may make itself.
SecretOrGenerate = Annotated[
    SecretRef,
    BeforeValidator(
        lambda value: {} if value == "generate" else value,
        json_schema_input_type=Literal["generate"] | SecretRef,
    ),
    PlainSerializer(lambda ref: "generate" if ref == GENERATED else {ref.kind: ref.value}),
]
