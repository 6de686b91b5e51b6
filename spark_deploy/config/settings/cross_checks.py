"""Rules between settings of different sections; each section has its own in ``broken()``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from spark_contract.gateway import EXPOSURES
from spark_contract.units import MAIN_SERVICE

from spark_deploy.config.documents import Violation, rules
from spark_deploy.config.schema_errors import closest
from spark_deploy.config.settings.service import PairSettings
from spark_deploy.config.settings.types import Settings


def _unknown_names(
    settings: Settings, catalog: Callable[[str], Sequence[str]]
) -> Iterator[Violation]:
    """Yield every model and profile that is in no catalog.

    Args:
        settings: of one host.
        catalog: returns the names there are of ``models`` or ``profiles``.
    """
    for prefix, pair in [
        ((), settings),
        *((("keep_ready", i), p) for i, p in enumerate(settings.keep_ready)),
        *((("services", name), entry) for name, entry in settings.services.items()),
    ]:
        for key in ("model", "profile"):
            name, known = getattr(pair, key), catalog(f"{key}s")
            if name not in known:
                guess = closest(name, known)
                fix = f"set one of these, or add catalog/{key}s/{name}.yml"
                yield Violation(
                    (*prefix, key),
                    f"'{name}' is not a {key} (known: {', '.join(known)})",
                    f"did you mean {guess}?" if guess else fix,
                )


def broken_rules(
    settings: Settings, catalog: Callable[[str], Sequence[str]] | None = None
) -> Iterator[Violation]:
    """Yield every broken rule; models and profiles are looked up in a catalog, if there is one."""
    if catalog:
        yield from _unknown_names(settings, catalog)
    yield from _unready_times(settings)
    for role in ("cuda", "docker"):
        for name in getattr(settings, role).repositories:
            if name not in settings.repositories:
                known = ", ".join(sorted(settings.repositories)) or "none"
                message = f"'{name}' is not described (known: {known})"
                fix = f"describe it under repositories: {{{name}: ...}}"
                yield Violation((role, "repositories"), message, fix)
    yield from _broken_services(settings)
    yield from _broken_replicas(settings)
    yield from _broken_in_sections(settings)


def _unready_times(settings: Settings) -> Iterator[Violation]:
    served = PairSettings(settings.model, settings.profile)
    timed = [PairSettings(entry.model, entry.profile) for entry in settings.schedule]
    for place, pair in enumerate(timed):
        if pair not in (served, *settings.keep_ready):
            message = f"{pair.model} with {pair.profile} is not kept ready"
            fix = f"keep_ready: [{{model: {pair.model}, profile: {pair.profile}}}]"
            yield Violation(("schedule", place), message, fix)
    if timed and settings.ranks > 1:
        message = "the members of a cluster change together, and a host's timer changes it alone"
        yield Violation(("schedule",), message, "leave the schedule out, or the cluster")
    if timed and served not in timed:
        message = f"no time leads back to {served.model} with {served.profile}"
        fix = "add a time for it, or make the pair of another time the model and profile"
        yield Violation(("schedule",), message, fix)


def _broken_replicas(settings: Settings) -> Iterator[Violation]:
    replicas = settings.replicas
    if not replicas.hosts:
        return
    if settings.cluster.hosts:
        message = "hosts of a cluster serve together, replicas each by itself"
        yield Violation(("replicas", "hosts"), message, "leave one of the two out")
    if EXPOSURES[settings.serve.expose].audience is None or settings.serve.expose == "docker":
        message = f"replicas do not reach each other with expose: {settings.serve.expose}"
        yield Violation(("serve", "expose"), message, "set tailscale, or lan")
    if settings.serve.tls != "off":
        message = "replicas speak to each other without TLS"
        yield Violation(
            ("serve", "tls"), message, "set expose: tailscale, which encrypts by itself"
        )
    if settings.serve.api_key.kind == "generate":
        message = "each host would make a key of its own, and clients know one"
        fix = "name one for all: {env: NAME}, {file: PATH} or {command: [PROGRAM]}"
        yield Violation(("serve", "api_key"), message, fix)
    if settings.rollout.at_once == "all" or settings.rollout.at_once >= len(replicas.hosts):
        message = "all replicas would be away at the same time"
        yield Violation(("rollout", "at_once"), message, f"at most {len(replicas.hosts) - 1}")


def _broken_services(settings: Settings) -> Iterator[Violation]:
    ports, answered = {settings.serve.port: "serve.port"}, dict[str, str]()
    if settings.replicas.hosts and ports.setdefault(settings.replicas.port, "") == "serve.port":
        message = f"{settings.replicas.port} is serve.port, too"
        yield Violation(("replicas", "port"), message, "choose another one")
    for name, service in settings.services.items():
        where = ("services", name)
        if name == MAIN_SERVICE:
            fix = "give it another name; model and profile at the top are the main one's"
            yield Violation(where, "is the name of the main service", fix)
        taken = ports.setdefault(service.port, f"services.{name}.port")
        for path in service.paths:
            first = answered.setdefault(path, name)
            if first != name:
                message = f"{path} is answered by services.{first}"
                yield Violation((*where, "paths"), message, "leave it with one of them")
        if taken != f"services.{name}.port":
            message = f"{service.port} is the port of {taken}"
            yield Violation((*where, "port"), message, "give each service a port of its own")
        for violation in service.broken(settings.memory.total_gib):
            yield violation._replace(key=(*where, *violation.key))


def _broken_in_sections(settings: Settings) -> Iterator[Violation]:
    for field in dataclasses.fields(settings):
        section = getattr(settings, field.name)
        if hasattr(section, "broken"):
            for violation in section.broken():
                set_by = violation.set_by and (field.name, *violation.set_by)
                yield violation._replace(key=(field.name, *violation.key), set_by=set_by)


CheckedSettings = Annotated[Settings, rules(broken_rules)]
