"""Rules between settings that a schema cannot express: one function each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spark_deploy.checkout import CHECKOUT, catalog_names
from spark_deploy.documents.schema_check import KeyPath, closest
from spark_deploy.errors import Problem
from spark_deploy.settings.engine_options import option_problems

Where = Callable[[KeyPath], str]

_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY)")


def rule_problems(
    data: dict[str, Any], where: Where, *, checkout: Path = CHECKOUT
) -> Iterator[Problem]:
    """Yield every broken rule of data that already fits the schema."""
    yield from _names_in_catalog(data, where, checkout)
    yield from _repositories_exist(data, where)
    yield from _memory_adds_up(data, where)
    yield from _paths_apart(data, where)
    yield from _options_are_free(data, where)
    yield from _no_secret_in_environment(data, where)
    yield from _tls_fits(data, where)


def _names_in_catalog(data: dict[str, Any], where: Where, checkout: Path) -> Iterator[Problem]:
    names: list[tuple[KeyPath, str, str, str]] = [
        ((key,), key, key, data[key]) for key in ("model", "profile")
    ]
    for index, pair in enumerate(data["keep_ready"]):
        names += [
            (("keep_ready", index, key), f"keep_ready[{index}].{key}", key, pair[key])
            for key in ("model", "profile")
        ]
    for path, shown, key, name in names:
        known = catalog_names(f"{key}s", checkout=checkout)
        if name not in known:
            guess = closest(name, known)
            yield Problem(
                f"{where(path)}: {shown}",
                f"'{name}' is not a {key} (known: {', '.join(known)})",
                f"did you mean {guess}?"
                if guess
                else f"set one of these, or add catalog/{key}s/{name}.yml",
            )


def _repositories_exist(data: dict[str, Any], where: Where) -> Iterator[Problem]:
    known = sorted(data["repositories"])
    for role in ("cuda", "docker"):
        for name in data[role]["repositories"]:
            if name not in known:
                place = f"{where((role, 'repositories'))}: {role}.repositories"
                what = f"'{name}' is not described (known: {', '.join(known) or 'none'})"
                yield Problem(place, what, f"describe it under repositories: {{{name}: ...}}")


def _memory_adds_up(data: dict[str, Any], where: Where) -> Iterator[Problem]:
    memory = data["memory"]
    if memory["reserve_gib"] >= memory["total_gib"]:
        what = f"reserve_gib {memory['reserve_gib']} leaves nothing of {memory['total_gib']} GiB"
        place = f"{where(('memory', 'reserve_gib'))}: memory.reserve_gib"
        yield Problem(place, what, "lower it below memory.total_gib")
    if memory["floor_gib"] > memory["reserve_gib"]:
        what = f"the watch would stop every engine: floor {memory['floor_gib']} GiB is above the"
        place = f"{where(('memory', 'floor_gib'))}: memory.floor_gib"
        fix = "keep floor_gib at or below memory.reserve_gib"
        yield Problem(place, f"{what} reserve {memory['reserve_gib']} GiB", fix)


def _paths_apart(data: dict[str, Any], where: Where) -> Iterator[Problem]:
    paths = sorted(data["paths"].items(), key=lambda item: str(item[1]))
    for (key, path), (other_key, other) in itertools.pairwise(paths):
        if other == path or other.startswith(path + "/"):
            place = f"{where(('paths', other_key))}: paths.{other_key}"
            what = f"{other} lies inside paths.{key} ({path})"
            yield Problem(place, what, "give every kind of data a folder of its own")


def _options_are_free(data: dict[str, Any], where: Where) -> Iterator[Problem]:
    for option, what, fix in option_problems(data["engine"]["options"]):
        place = f"{where(('engine', 'options', option))}: engine.options.{option}"
        yield Problem(place, what, fix)


def _no_secret_in_environment(data: dict[str, Any], where: Where) -> Iterator[Problem]:
    for name in sorted(data["engine"]["environment"]):
        if _SECRET_NAME.search(name):
            place = f"{where(('engine', 'environment', name))}: engine.environment.{name}"
            what = "looks like a secret; the environment of a unit can be read by others"
            yield Problem(
                place, what, "use hub.token or serve.api_key with {env|file|command: ...}"
            )


def _tls_fits(data: dict[str, Any], where: Where) -> Iterator[Problem]:
    serve = data["serve"]
    mode = serve["tls"] or "off"
    if mode != "off" and serve["expose"] != "lan":
        what = f"{mode} with expose: {serve['expose']}; TLS is for what leaves the host in the open"
        fix = "set serve.expose: lan, or serve.tls: off"
        yield Problem(f"{where(('serve', 'tls'))}: serve.tls", what, fix)
    for key in ("tls_certificate", "tls_key"):
        if mode == "own-cert" and not serve[key]:
            place = f"{where(('serve', 'tls'))}: serve.{key}"
            yield Problem(place, "is needed with tls: own-cert", "name a PEM file of this machine")
