"""What a host serves and how well that is proven: one JSON object from the host tools."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyinfra.api.exceptions import FactProcessError
from pyinfra.api.facts import FactBase


@dataclass(frozen=True, slots=True)
class HostStatus:
    """``spark-host status``; an empty document means that the tools are not there yet."""

    document: dict[str, Any]

    @property
    def installed(self) -> bool:
        """Whether the host has our tools at all."""
        return bool(self.document)

    def service(self, service: str) -> dict[str, Any]:
        """Return what is known of one service: good, active, enabled, door, gateway."""
        found: dict[str, Any] = self.document.get("services", {}).get(service, {})
        return found

    def proof(self, release: str) -> dict[str, Any]:
        """Return the last proof of a release; empty when there is none."""
        found: dict[str, Any] = self.document.get("proofs", {}).get(release, {})
        return found

    def live(self, release: str) -> dict[str, Any]:
        """Return the outcome of one completion through the running engine."""
        found: dict[str, Any] = self.document.get("live") or {}
        return found if found.get("release") == release else {}

    def stopped(self, service: str) -> str:
        """Say who stopped a service on purpose, and since when; "" when nobody did."""
        found = self.service(service).get("stopped_by_hand")
        if not found:
            return ""
        who = found.get("by") or "someone on the host"
        return (
            f"{service} was stopped on purpose by {who} and is down since {found.get('at')}; "
            "`spark-deploy start` brings it back"
        )

    def unknown_versions(self) -> str:
        """Say which versions the host could not tell; "" when it told all."""
        names = ", ".join(self.document.get("versions_unknown", ()))
        return f"no version of {names}: no answer in time; taken as unchanged" if names else ""

    def unproven(self, service: str, release: str) -> str:
        """Say why ``release`` is not what the host provably serves; "" when it is."""
        state = self.service(service)
        proof, live = self.proof(release), self.live(release)
        reasons = (
            (not self.installed, "the host tools are not there yet"),
            (state.get("active") != release, f"serves {state.get('active') or 'nothing'}"),
            (state.get("good") != release, "its check has not passed yet"),
            (
                state.get("enabled") != [release],
                f"boots {', '.join(state.get('enabled') or ()) or 'nothing'}",
            ),
            (not proof.get("current"), f"proof: {proof.get('why') or 'none'}"),
            (not state.get("door_open"), "the gateway is closed"),
            (
                (state.get("gateway") or {}).get("active") != "active",
                "the gateway is not running",
            ),
            (
                not (state.get("gateway") or {}).get("enabled", True),
                "the gateway does not start with the host",
            ),
            ((state.get("gateway") or {}).get("key_problem"), "the API key is missing or exposed"),
            (
                (state.get("gateway") or {}).get("difference"),
                f"the gateway: {(state.get('gateway') or {}).get('difference')}",
            ),
            (not live.get("ok"), f"no answer: {live.get('detail') or 'not asked'}"),
        )
        return next((text for wrong, text in reasons if wrong), "")


class Status(FactBase[HostStatus]):
    """Everything the host tools know, one live completion included."""

    @staticmethod
    def default() -> HostStatus:
        """Return what a host without our tools has to say."""
        return HostStatus({})

    def command(self, tools_dir: str) -> str:
        tool = shlex.quote(f"{tools_dir}/current/bin/spark-host")
        return f"if [ -x {tool} ]; then {tool} status --live; fi"

    def process(self, output: Iterable[str]) -> HostStatus:
        text = "\n".join(output).strip()
        try:
            return HostStatus(json.loads(text) if text else {})
        except ValueError as error:
            raise FactProcessError(f"spark-host status: {error}") from error


class UserExists(FactBase[bool]):
    """Whether a system user is known to the host."""

    default = bool

    def command(self, user: str) -> str:
        return f"getent passwd {shlex.quote(user)} >/dev/null && echo yes || echo no"

    def process(self, output: Iterable[str]) -> bool:
        return "yes" in list(output)
