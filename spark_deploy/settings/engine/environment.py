"""Variables of the engine's container that nobody may choose, and values of several lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY)")
# Each is about a name as a whole.
_REFUSED = (
    (
        re.compile(
            r"LD_.*|GLIBC_TUNABLES|GCONV_PATH|GETCONF_DIR|LOCPATH|NLSPATH|MALLOC_.*|HOSTALIASES|"
            r"PYTHON.*|BASH_ENV|ENV|IFS|PATH"
        ),
        "has programs load or run other code than their own",
        "put what is needed into the image",
    ),
    (
        re.compile(r"(DOCKER|BUILDKIT|BUILDX|COMPOSE|CONTAINERD|RUNC|NVIDIA)_.*"),
        "is read by docker and its runtimes, which are root",
        "leave it out: the plan says how the engine gets the GPU",
    ),
    (
        re.compile(r"VLLM_SERVER_DEV_MODE"),
        "opens paths that change a running engine",
        "leave it out",
    ),
)
_MAX_BYTES = 32_768


def environment_problems(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, what, fix) for each variable that must not be given."""
    for name in sorted(environment):
        if _SECRET.search(name):
            what = "looks like a secret; the environment of a unit can be read by others"
            yield name, what, "use hub.token or serve.api_key with {env|file|command: ...}"
        for pattern, what, fix in _REFUSED:
            if pattern.fullmatch(name):
                yield name, what, fix
        value = environment[name]
        if any(letter in value for letter in "\n\r\0"):
            yield name, "is more than one line", "write it in one line"
        elif len(value.encode()) > _MAX_BYTES:
            yield name, f"is longer than {_MAX_BYTES} bytes", "put it into a file of the image"
