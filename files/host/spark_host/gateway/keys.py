"""Named API keys: nginx maps, limits and usage per key.

nginx logs each request, and a daily job adds the lines to totals. A power cut can lose lines.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from spark_contract import files
from spark_contract.gateway import Gateway, NamedKey
from spark_contract.paths import Paths
from spark_contract.status import KeyUsage, Usage

from spark_host.gateway import nginx
from spark_host.system.host import read_document, write_document
from spark_host.system.programs import read_output

IS_NAMED = "$spark_is_named"  # whether the request has a named key
SCRIPT = "keys.js"
_FORM = "sk-[A-Za-z0-9_-]{43}"
_LINE = re.compile(rb"\0*([\w-]+) (\d+) (\d+)\n")
_UNNAMED = "api_key"  # names of keys have no underscore


def render_config(settings: Gateway, paths: Paths) -> str:
    keys = settings.keys or {}
    if not keys:
        return ""
    values = {
        "SCRIPT": str(paths.gateway_run(settings.service) / SCRIPT),
        "FORM": _FORM,
        "DIGESTS": "\n    ".join(f"{key.sha256} {name};" for name, key in keys.items()),
        "BODY_LIMITED": " ".join(
            f'"~^{name}$" $spark_exceeds_body_limit;'
            for name, key in keys.items()
            if key.max_body_bytes
        ),
        "OUTPUT_LIMITED": " ".join(
            f'"~^{name}$" 1;' for name, key in keys.items() if key.max_output_tokens
        ),
        "UNNAMED": _UNNAMED,
        "CLIENT": nginx.client_variable(settings),
        "LIMITS": "\n".join(_render_limits(keys)),
        "LOG": str(_usage_log(paths.usage(settings.service))),
    }
    return nginx.render_template("named_keys.conf", values)


def render_script(settings: Gateway) -> str:
    keys = settings.keys or {}
    constants = {
        "BODY_LIMITS": {name: key.max_body_bytes for name, key in keys.items()},
        "OUTPUT_LIMITS": {name: key.max_output_tokens for name, key in keys.items()},
        "OUTPUT_FIELDS": {
            route.path: route.output_fields for route in nginx.ROUTES if route.output_fields
        },
    }
    return nginx.combine_script(SCRIPT, constants)


def _render_limits(keys: dict[str, NamedKey]) -> Iterator[str]:
    """Yield nginx directives with a zone for each distinct limit.

    A zone's name contains the limit, because a reload cannot change the rate of an existing zone.
    """
    for limit, entries in _map_entries_by_limit(keys, "max_concurrent"):
        zone = f"concurrent_{limit}"
        yield f'map $spark_limited_user $spark_{zone} {{ default ""; {entries} }}'
        yield f"limit_conn_zone $spark_{zone} zone={zone}:1m;\nlimit_conn {zone} {limit};"
    for limit, entries in _map_entries_by_limit(keys, "max_requests_per_min"):
        zone = f"per_min_{limit}"
        yield f'map $spark_limited_user $spark_{zone} {{ default ""; {entries} }}'
        yield f"limit_req_zone $spark_{zone} zone={zone}:1m rate={limit}r/m;"
        yield f"limit_req zone={zone} burst={limit} nodelay;"


def _map_entries_by_limit(keys: dict[str, NamedKey], field: str) -> Iterator[tuple[int, str]]:
    limits = {name: getattr(key, field) for name, key in keys.items()}
    for limit in sorted({*limits.values()} - {None}):
        names = (name for name in limits if limits[name] == limit)
        yield limit, " ".join(f'"~^{name}$" {name};' for name in names)


def read_usage(service: str, paths: Paths) -> Usage:
    """Return totals per key, including requests that are still only in the log."""
    path = paths.usage(service)
    usage = read_document(Usage, path) or Usage({}, 0)
    if not _usage_log(path).exists():
        return usage
    keys, counted_bytes = dict(usage.keys), usage.counted_bytes
    with _usage_log(path).open("rb") as log:
        # The log is shorter if someone has replaced it.
        if counted_bytes > os.fstat(log.fileno()).st_size:
            counted_bytes = 0
        log.seek(counted_bytes)
        for line in log:
            if not line.endswith(b"\n"):  # nginx is still writing it
                break
            counted_bytes += len(line)
            if match := _LINE.fullmatch(line):  # a power cut can leave zeros in the log
                name, received, sent = match[1].decode(), int(match[2]), int(match[3])
                keys[name] = keys.get(name, KeyUsage()) + KeyUsage(1, received, sent)
    return Usage(keys, counted_bytes)


def add_logged_usage(paths: Paths) -> None:
    for log in paths.usage("").parent.glob("*.log"):
        usage = read_usage(log.stem, paths)
        with log.open("rb") as lines:  # a power cut must not make the log shorter than counted
            files.sync(lines.fileno())
        write_document(paths.usage(log.stem), usage)
        # Free the space, but keep the length: truncating could remove lines logged meanwhile.
        if usage.counted_bytes:
            read_output("fallocate", "--punch-hole", f"--length={usage.counted_bytes}", str(log))


def _usage_log(path: Path) -> Path:
    return path.with_suffix(".log")
