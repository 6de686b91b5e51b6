"""Types of strings that are sent to hosts, and references to secrets, which are not read here."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema

from spark_deploy.config.documents import Text, text_schema

# Text for shells, units, apt, docker's ``--mount`` and nginx must not end a line, start an option
# or separate values.


def text_field(pattern: str, description: str, example: str) -> Any:
    """Return the annotation of a text that must match a pattern; see ``text_schema``."""
    return Field(json_schema_extra=text_schema(pattern, description, example))


_PART = r"(?!\.{1,2}(/|$))[A-Za-z0-9._+@-]+"
# In unit files, ``--mount`` and shells: no blank, comma, colon or ``%``.
_FOLDER = rf"^(/{_PART})+$"
Folder = Annotated[
    str, text_field(_FOLDER, "an absolute path of letters, digits and . _ + @ -", "/data/models")
]
_GLOB = r"^(/(?!\.{1,2}(/|$))[A-Za-z0-9._+@*?\[\]-]+)+$"
Glob = Annotated[
    str,
    text_field(_GLOB, "an absolute path without spaces; * and ? are wildcards", "/home/*/models"),
]
_RELATIVE = rf"^{_PART}(/{_PART})*$"
RelativePath = Annotated[
    str, text_field(_RELATIVE, "a relative path without . or ..", "locks/spark.lock.yml")
]
_PACKAGE = r"^[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?$"
Package = Annotated[
    str, text_field(_PACKAGE, "an apt package, optionally with =VERSION", "jq=1.7.1-3")
]
_SUITE = r"^(\./|[A-Za-z0-9][A-Za-z0-9._/-]*)$"
Suite = Annotated[str, text_field(_SUITE, "a word, or ./ for a flat repository", "noble")]
Component = Annotated[str, text_field(r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", "a word", "main")]
# No login, because every user of a host can read jobs, locks and apt lists.
_URL = r"^https?://(?![^/]*@)[A-Za-z0-9\[]([A-Za-z0-9._~:/?%&=+@,\[\]-]*[A-Za-z0-9._~%&=+@,\]-])?$"
_URL_MEANING = "http:// or https:// and a host, without credentials, spaces or a trailing slash"
Url = Annotated[str, text_field(_URL, _URL_MEANING, "https://hub.example/mirror")]
_INTERFACE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$"
Interface = Annotated[
    str, text_field(_INTERFACE, "an interface that `ip link` lists", "enp1s0f0np0")
]
_CONTAINER = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
ContainerName = Annotated[str, text_field(_CONTAINER, "the name that `docker ps` shows", "ollama")]
_LOGIN = r"^[A-Za-z_][A-Za-z0-9_.@-]*\$?$"
Login = Annotated[str, text_field(_LOGIN, "a login name without host", "spark")]
_OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
# Digits and dots alone must be an IPv4 address.
_NO_WRONG_IPV4 = rf"(?=.*[^0-9.]|({_OCTET}\.){{3}}{_OCTET}$)"
_ADDRESS = rf"^{_NO_WRONG_IPV4}[A-Za-z0-9\[:][A-Za-z0-9._:%\]-]*$"
Address = Annotated[
    str,
    text_field(_ADDRESS, "a host's name or address, without a user name or spaces", "192.0.2.20"),
]
# In ``from=`` of authorized_keys: no ``!``, comma or quote.
_SOURCE = r"^[A-Za-z0-9*?:][A-Za-z0-9.:*?/_-]*$"
SshSource = Annotated[
    str, text_field(_SOURCE, "an address, network or name; * and ? are wildcards", "192.168.1.0/24")
]
IpAddress = Annotated[
    str,
    text_field(rf"^{_NO_WRONG_IPV4}[0-9a-fA-F.:]+$", "an IP address, not a name", "192.168.100.11"),
]
_IMAGE = "^[a-z0-9][A-Za-z0-9._/:@-]*$"
ImageName = Annotated[
    str, text_field(_IMAGE, "an image that `docker pull` accepts", "vllm/vllm-openai:v0.11.0")
]
IMAGE_ROLE = text_schema("^[a-z][a-z0-9_]*$", "a name of lowercase letters, digits and _", "engine")
RAIL_NAME = text_schema(
    "^[a-z0-9-]+$", "the name of the rule in the error message", "turboquant-with-drafts"
)
RailName = Annotated[str, Field(json_schema_extra=RAIL_NAME)]

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def paths_with_control_characters(
    data: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every string or key that contains a control character."""
    if isinstance(data, str):
        if _CONTROL.search(data):
            yield path
    elif isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(key, str) and _CONTROL.search(key):
                yield path
            yield from paths_with_control_characters(value, (*path, str(key)))
    elif isinstance(data, Sequence):
        for index, value in enumerate(data):
            yield from paths_with_control_characters(value, (*path, index))


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
