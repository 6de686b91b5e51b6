"""A gateway for three services with recording engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from recorder import Recorder
from spark_contract.documents import text_of
from spark_host.gateway import traffic
from stub_gateway import Door
from stub_host import Host

CHAT = "/v1/chat/completions"
NAMES = {"main": ["main-model", "alias"], "embed": ["embedder"], "rank": ["org/ranker", "ranker"]}
MIB = 2**20


@dataclass
class House:
    """A gateway before three services; the engines are recorders."""

    door: Door
    engines: dict[str, Recorder]

    @property
    def key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.door.key}"}

    def ask(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        status, _, said = self.door.ask(path, body, **{**self.key, **headers})
        return status, said

    def raw(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        connection = self.door.connect()
        connection.request("POST", path, body, {**self.key, **headers})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def taken(self) -> dict[str, list[str]]:
        return {
            name: [line.split()[1] for line in lines]
            for name, engine in self.engines.items()
            if (lines := engine.taken())
        }


def prepare(host: Host, service: str, names: list[str]) -> None:
    settings = replace(host.gateway(), service=service, port=18081)
    host.paths.gateway_settings(service).write_text(text_of(settings))
    release = host.release(f"{service}-0123456789ab", service=service, names=names)
    traffic.open_for(release, host.paths)


def open_again(house: House, service: str) -> None:
    release = house.door.host.release(
        f"{service}-0123456789ab", service=service, names=NAMES[service]
    )
    traffic.open_for(release, house.door.host.paths)
