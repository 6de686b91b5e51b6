"""Paths of a gateway that the engine of another service answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from recorder import Recorder, recording
from spark_contract.documents import text_of
from spark_host.gateway import gateway, traffic
from stub_gateway import Door, running
from stub_host import Host

BODY = {"model": "vectors", "input": "Berlin"}


@pytest.fixture
def routed(host: Host, nginx_program: Path) -> Iterator[tuple[Door, Recorder, Recorder]]:
    (host.paths.root / "usr/sbin").mkdir(parents=True)
    (host.paths.root / "usr/sbin/nginx").symlink_to(nginx_program)
    own = replace(host.gateway(), service="embed", port=18081)
    host.paths.gateway_settings("embed").write_text(text_of(own))
    embed = host.release("embed-0123456789ab", service="embed")
    with ExitStack() as stack:
        chat = stack.enter_context(recording(host.paths.engine_socket("main")))
        vectors = stack.enter_context(recording(host.paths.engine_socket("embed")))
        traffic.open_for(embed, host.paths)
        routes = {"/v1/embeddings": "embed"}
        door = stack.enter_context(running(host, engine=False, routes=routes))
        yield door, chat, vectors


def test_routed_path_reaches_the_other_service(routed):
    door, chat, vectors = routed
    key = {"Authorization": f"Bearer {door.key}"}
    assert door.ask("/v1/embeddings", BODY, **key)[0] == 200
    assert door.ask("/v1/chat/completions", BODY, **key)[0] == 200
    assert door.ask("/v1/rerank", BODY, **key)[0] == 200
    assert vectors.taken() == ["POST /v1/embeddings HTTP/1.1"]
    assert chat.taken() == ["POST /v1/chat/completions HTTP/1.1", "POST /v1/rerank HTTP/1.1"]


def test_routed_path_needs_key_and_method(routed):
    door, chat, vectors = routed
    assert door.ask("/v1/embeddings", BODY)[0] == 401
    key = {"Authorization": f"Bearer {door.key}"}
    assert door.ask("/v1/embeddings", method="GET", **key)[0] == 405
    assert chat.taken() == vectors.taken() == []


def test_services_open_and_close_independently(routed):
    door, chat, vectors = routed
    key = {"Authorization": f"Bearer {door.key}"}
    traffic.close("embed", door.host.paths)
    status, _, said = door.ask("/v1/embeddings", BODY, **key)
    assert status == 503
    assert "not available" in json.loads(said)["error"]["message"]
    assert door.ask("/v1/completions", BODY, **key)[0] == 200
    traffic.close("main", door.host.paths)
    assert door.ask("/v1/completions", BODY, **key)[0] == 503
    assert vectors.taken() == []
    assert len(chat.taken()) == 1


def test_concurrent_configuration_writes_are_serialised(host: Host, nginx_program: Path) -> None:
    (host.paths.root / "usr/sbin").mkdir(parents=True)
    (host.paths.root / "usr/sbin/nginx").symlink_to(nginx_program)
    settings = host.gateway()
    gateway.make_key(settings, host.paths)
    with ThreadPoolExecutor(8) as together:
        made = [together.submit(gateway._install_config, settings, host.paths) for _ in range(24)]
    assert {one.result() for one in made} == {host.paths.gateway_run("main")}
    assert gateway.is_current(settings, host.paths)
