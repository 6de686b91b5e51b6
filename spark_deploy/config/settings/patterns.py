"""Types of text that reaches hosts, and checks of text that a pattern cannot express."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from spark_deploy.config.documents import form

# Text for shells, units, apt, docker's ``--mount`` and nginx must not end a line, start an option
# or separate values.


def text(pattern: str, description: str, example: str) -> Any:
    """Return the annotation of a text that must match a pattern as a whole; as in ``form``."""
    return Field(json_schema_extra=form(pattern, description, example))


_PART = r"(?!\.{1,2}(/|$))[A-Za-z0-9._+@-]+"
# In unit files, ``--mount`` and shells: no blank, comma, colon or ``%``.
Folder = Annotated[
    str,
    text(
        rf"^(/{_PART})+$",
        "an absolute path of letters, digits and . _ + @ -",
        "/data/models",
    ),
]
Glob = Annotated[
    str,
    text(
        r"^(/(?!\.{1,2}(/|$))[A-Za-z0-9._+@*?\[\]-]+)+$",
        "an absolute path without blanks; * and ? are wildcards",
        "/home/*/.cache/huggingface/hub",
    ),
]
RelativePath = Annotated[
    str,
    text(
        rf"^{_PART}(/{_PART})*$",
        "a relative path that does not lead upwards",
        "locks/spark.lock.yml",
    ),
]
Package = Annotated[
    str,
    text(
        r"^[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?$",
        "a package as apt names it, with =VERSION if needed",
        "docker-ce=5:28.5.1-1",
    ),
]
Suite = Annotated[
    str,
    text(r"^(\./|[A-Za-z0-9][A-Za-z0-9._/-]*)$", "a word, or ./ for a flat repository", "noble"),
]
Component = Annotated[str, text(r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", "a word", "main")]
# No login, because jobs, locks and apt lists are readable by every user of a host.
Url = Annotated[
    str,
    text(
        r"^https?://(?![^/]*@)[A-Za-z0-9\[]([A-Za-z0-9._~:/?%&=+@,\[\]-]*[A-Za-z0-9._~%&=+@,\]-])?$",
        "http:// or https:// and a host, without a login, blanks, or a slash at the end",
        "https://hub.example/mirror",
    ),
]
Interface = Annotated[
    str,
    text(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$", "an interface that `ip link` lists", "enp1s0f0np0"),
]
ContainerName = Annotated[
    str, text(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", "the name that `docker ps` shows", "ollama")
]
Login = Annotated[
    str, text(r"^[A-Za-z_][A-Za-z0-9_.@-]*\$?$", "a login name without host", "spark")
]
Address = Annotated[
    str,
    text(
        r"^[A-Za-z0-9\[:][A-Za-z0-9._:%\]-]*$",
        "a host's name or address, without a user and without blanks",
        "192.168.1.20",
    ),
]
# In ``from=`` of authorized_keys: no ``!``, comma or quote.
SshSource = Annotated[
    str,
    text(
        r"^[A-Za-z0-9*?:][A-Za-z0-9.:*?/_-]*$",
        "an address, network or name; * and ? are wildcards",
        "192.168.1.0/24",
    ),
]
IpAddress = Annotated[str, text("^[0-9a-fA-F.:]+$", "an IP address, no name", "192.168.100.11")]
ImageName = Annotated[
    str,
    text(
        "^[a-z0-9][A-Za-z0-9._/:@-]*$",
        "an image as `docker pull` takes it",
        "vllm/vllm-openai:v0.11.0",
    ),
]
IMAGE_ROLE = form("^[a-z][a-z0-9_]*$", "a name of small letters, digits and _", "engine")
RAIL_NAME = form("^[a-z0-9-]+$", "the rule as the error named it", "turboquant-with-drafts")
RailName = Annotated[str, Field(json_schema_extra=RAIL_NAME)]

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def control_characters(
    data: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each text in plain data, keys included, with a control character."""
    if isinstance(data, str):
        if _CONTROL.search(data):
            yield path
    elif isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(key, str) and _CONTROL.search(key):
                yield path
            yield from control_characters(value, (*path, str(key)))
    elif isinstance(data, Sequence):
        for number, value in enumerate(data):
            yield from control_characters(value, (*path, number))
