"""A gateway of a host with several services: the model that a request names chooses among them."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from recorder import Recorder, recording
from spark_contract import files
from spark_contract.documents import text_of
from spark_contract.errors import HostToolError
from spark_host.gateway import nginx, traffic
from stub_gateway import QUESTION, Door, long_answer, running
from stub_host import Host, release_data

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
        """Return the paths that reached each engine since this was asked last."""
        return {
            name: [line.split()[1] for line in lines]
            for name, engine in self.engines.items()
            if (lines := engine.taken())
        }


def prepare(host: Host, service: str, names: list[str]) -> None:
    """Have a service beside the main one, with its traffic open."""
    settings = replace(host.gateway(), service=service, port=18081)
    host.paths.gateway_settings(service).write_text(text_of(settings))
    release = host.release(f"{service}-0123456789ab", service=service, names=names)
    traffic.open_for(release, host.paths)


@pytest.fixture
def house(host: Host, nginx_with_names: None) -> Iterator[House]:
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(recording(host.paths.engine_socket(name))) for name in NAMES
        }
        for name in ("embed", "rank"):
            prepare(host, name, NAMES[name])
        door = stack.enter_context(
            running(host, engine=False, names=NAMES, max_body_bytes=8 * MIB,
                    routes={"/v1/embeddings": "embed", "/v1/rerank": "rank"})
        )  # fmt: skip
        yield House(door, engines)


def open_again(house: House, service: str) -> None:
    release = house.door.host.release(
        f"{service}-0123456789ab", service=service, names=NAMES[service]
    )
    traffic.open_for(release, house.door.host.paths)


@pytest.mark.parametrize(
    ("model", "service"),
    [("main-model", "main"), ("alias", "main"), ("embedder", "embed"), ("org/ranker", "rank")],
)
def test_the_name_chooses_the_engine_whatever_the_path(house, model, service):
    for path in (CHAT, "/v1/embeddings", "/v1/rerank", "/v1/messages"):
        assert house.ask(path, {"messages": [], "model": model})[0] == 200
        assert house.taken() == {service: [path]}


def test_without_a_name_the_path_chooses_as_before(house):
    for body in ({}, {"model": None}, {"model": 3}, [], "model", {"a": {"model": "embedder"}}):
        assert house.ask(CHAT, body)[0] == 200
        assert house.taken() == {"main": [CHAT]}
        assert house.ask("/v1/embeddings", body)[0] == 200
        assert house.taken() == {"embed": ["/v1/embeddings"]}
    assert house.raw(CHAT, b"")[0] == 200
    assert house.raw(CHAT, b'{"model": "embedder')[0] == 200
    assert house.taken() == {"main": [CHAT, CHAT]}


def test_a_name_that_nobody_has_is_told_in_the_form_of_openai_and_reaches_no_engine(house):
    status, said = house.ask(CHAT, {"model": 'gpt-"5"\u00e9', "messages": []})
    error = json.loads(said)["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert 'gpt-"5"\u00e9' in error["message"]
    long = house.ask(CHAT, {"model": "x" * MIB, "messages": []})
    assert long[0] == 404
    assert len(long[1]) < 600
    assert house.taken() == {}


def test_the_path_query_and_body_arrive_as_they_were_sent(house):
    body = json.dumps({"input": 'Wörter\n"quoted"', "model": "embedder"}).encode()
    assert house.raw("/v1/embeddings?a=%2F&b=1", body)[0] == 200
    assert house.taken() == {"embed": ["/v1/embeddings?a=%2F&b=1"]}
    assert house.engines["embed"].last == body
    # The engine has its own path for these, whoever was chosen.
    assert house.ask("/v1/classify", {"model": "ranker"})[0] == 200
    assert house.taken() == {"rank": ["/classify"]}


@pytest.mark.parametrize("size", [90_000, 99_999, 100_000, 131_072, 7 * MIB])
@pytest.mark.parametrize("first", [True, False])
def test_bodies_of_any_size_are_read_for_the_name_and_arrive_whole(house, size, first):
    text = random.Random(size).choices('ab\\"\n{}[]:,é', k=1000)
    long = ("".join(text) * (size // 1000))[: size // 2]
    items = [("model", "embedder"), ("messages", [{"content": long, "model": "main-model"}])]
    body = json.dumps(dict(items if first else items[::-1])).encode()
    body += b" " * max(0, size - len(body))
    assert house.raw(CHAT, body)[0] == 200
    assert house.taken() == {"embed": [CHAT]}
    assert house.engines["embed"].last == body


def test_bodies_without_a_told_size_are_read_too(house):
    body = json.dumps({"messages": ["x" * 300_000], "model": "ranker"}).encode()
    connection = house.door.connect()
    pieces = (body[at : at + 4096] for at in range(0, len(body), 4096))
    connection.request("POST", CHAT, pieces, house.key, encode_chunked=True)
    answer = connection.getresponse()
    assert (answer.status, house.taken()) == (200, {"rank": [CHAT]})
    connection.close()
    assert house.engines["rank"].last == body


def test_a_body_over_the_limit_is_refused(house):
    status, said = house.raw(CHAT, b'{"model": "embedder", "a": "' + b"x" * 8 * MIB + b'"}')
    assert (status, json.loads(said)["error"]["message"]) == (413, "request body too large")
    assert house.taken() == {}


def test_no_body_stays_on_the_disk(house):
    folder = house.door.host.paths.gateway_bodies("main") / "body"
    body = json.dumps({"messages": ["x" * MIB], "model": "ranker"}).encode()
    for _ in range(3):
        assert house.raw(CHAT, body)[0] == 200
    deadline = time.monotonic() + 10
    while kept := [one for one in folder.rglob("*") if one.is_file()]:
        assert time.monotonic() < deadline, kept
        time.sleep(0.05)


def test_what_a_killed_gateway_left_of_bodies_is_gone_when_it_starts(
    host: Host, nginx_with_names: None
) -> None:
    folder = host.paths.gateway_bodies("main") / "body"
    folder.mkdir(parents=True)
    (folder / "0000000007").write_text("a secret")
    with recording(host.paths.engine_socket("main")), running(host, engine=False, names=NAMES):
        assert not (folder / "0000000007").exists()


SIGNS = ['"', "\\", "a", "}", "{", "é", "😀", "\n", ":"]
KEYS = ["model", "model ", "Model", "a", 'model"', "\\model"]


def value(drawn: random.Random, depth: int) -> Any:
    kind = drawn.randrange(7 if depth < 4 else 4)
    if kind == 0:
        return drawn.choice([None, True, -1.5e3, 7])
    if kind < 4:
        return "".join(drawn.choices(SIGNS, k=5))
    parts = range(drawn.randrange(4))
    if kind == 4:
        return [value(drawn, depth + 1) for _ in parts]
    return {drawn.choice(KEYS): value(drawn, depth + 1) for _ in parts}


def member(drawn: random.Random, name: str, what: Any) -> str:
    plain = json.dumps(name, ensure_ascii=drawn.random() < 0.5)
    if name == "model" and drawn.random() < 0.3:
        plain = '"' + "".join(f"\\u{ord(one):04x}" for one in name) + '"'
    space = drawn.choice(["", " ", "\n\t"])
    return f"{space}{plain}{space}:{space}{json.dumps(what, indent=drawn.choice([None, 2]))}"


def body_of(drawn: random.Random) -> str:
    """Return JSON with `model` at any depth, escaped, twice, long, in any order."""
    parts = [member(drawn, drawn.choice(KEYS), value(drawn, 1)) for _ in range(drawn.randrange(4))]
    named = [drawn.choice(["embedder", "ranker", "main-model"]) for _ in range(drawn.randrange(3))]
    parts += [member(drawn, "model", name) for name in named]
    if drawn.random() < 0.1:
        parts.append(member(drawn, "input", "y" * 70_000 * drawn.randrange(1, 3)))
    drawn.shuffle(parts)
    return "{" + ",".join(parts) + "}"


def test_the_reading_agrees_with_python_on_any_json(house):
    of = {"embedder": "embed", "ranker": "rank", "main-model": "main"}
    drawn, chosen = random.Random(7), 0
    for _ in range(300):
        text = body_of(drawn)
        model = json.loads(text).get("model")
        status, _ = house.raw(CHAT, text.encode())
        if isinstance(model, str) and model not in of:
            assert (status, house.taken()) == (404, {}), text[:500]
        else:
            wanted = of.get(model, "main") if isinstance(model, str) else "main"
            assert house.taken() == {wanted: [CHAT]}, text[:500]
            chosen += wanted != "main"
    assert chosen > 50


def test_what_opens_no_json_opens_nothing(house):
    for body in (b"\xff\xfe{", b"[" * 200_000, b'{"model"' * 20_000, b"\x00" * 200_000, b"}" * 9):
        assert house.raw(CHAT, body)[0] == 200
        assert house.taken() == {"main": [CHAT]}


def test_reading_a_body_takes_no_memory_for_what_it_holds(house):
    """With a variable made anew in each turn of the loop these take 130 MiB."""

    def kept() -> int:
        master = house.door.process.pid
        with open(f"/proc/{master}/task/{master}/children") as source:
            told = [Path(f"/proc/{pid}/status").read_text() for pid in source.read().split()]
        return sum(int(re.findall(r"RssAnon:\s+(\d+)", one)[0]) << 10 for one in told)

    before = kept()
    for body in (b'{"a":' + b"[" * 4 * MIB, json.dumps({"a": list(range(500_000))}).encode()):
        assert house.raw(CHAT, body)[0] == 200
    assert kept() - before < 16 * MIB


def test_key_method_and_list_hold_as_for_one_service(house):
    body = {"model": "embedder"}
    assert house.door.ask(CHAT, body)[0] == 401
    assert house.door.ask("/v1/models")[0] == 401
    assert house.door.ask(CHAT, method="GET", **house.key)[0] == 405
    inner = ("/by-name", "/by-name-large", "/engine/embed", "/engine/main", "/engine")
    for place in (*inner, "//engine/embed", "/x/../engine/embed", "/%65ngine/embed"):
        for path in (CHAT, "/metrics", "/v1/models", "/../../metrics", "/tokenize"):
            assert house.ask(place + path, body)[0] in (400, 404)
            assert house.door.ask(place + path, **house.key)[0] in (400, 404)
    for path in ("/metrics", "/tokenize", "/v1/chat/completions/render", "/v1/load_lora_adapter"):
        assert house.ask(path, body)[0] == 404
    assert house.taken() == {}


def test_a_service_that_is_closed_says_when_to_ask_again_and_the_others_answer(house):
    traffic.close("embed", house.door.host.paths)
    status, headers, said = house.door.ask(CHAT, {"model": "embedder"}, **house.key)
    assert (status, headers["Retry-After"]) == (503, "10")
    assert "not available right now, try again" in json.loads(said)["error"]["message"]
    assert house.ask(CHAT, {"model": "main-model"})[0] == 200
    traffic.close("main", house.door.host.paths)
    assert house.ask(CHAT, {"model": "ranker"})[0] == 200
    assert house.taken() == {"main": [CHAT], "rank": [CHAT]}
    open_again(house, "embed")
    assert house.ask(CHAT, {"model": "embedder"})[0] == 200


def test_an_engine_that_is_gone_is_told_as_one_that_is_away(house):
    house.door.host.paths.engine_socket("embed").unlink()
    status, headers, _ = house.door.ask(CHAT, {"model": "embedder"}, **house.key)
    assert (status, headers["Retry-After"]) == (503, "10")


def test_an_older_release_is_known_by_the_names_that_it_answers_to(house):
    paths = house.door.host.paths
    older = house.door.host.release("embed-aaaaaaaaaaaa", service="embed", names=["before"])
    traffic.open_for(older, paths)
    assert house.ask(CHAT, {"model": "before"})[0] == 200
    assert house.ask(CHAT, {"model": "embedder"})[0] == 404
    # As tools of before wrote it.
    files.write_text(paths.traffic("embed"), "embed-0123456789ab\n")
    assert house.ask(CHAT, {"model": "embedder"})[0] == 200
    assert house.taken() == {"embed": [CHAT, CHAT]}


def answered(house: House, bodies: list[bytes]) -> list[int]:
    """Ask for all of them at once; return the statuses, once each has one or waits in an engine."""
    with ThreadPoolExecutor(len(bodies)) as together:
        asked = [together.submit(house.raw, CHAT, body) for body in bodies]
        deadline = time.monotonic() + 20
        engine = house.engines["embed"]
        while len(engine.lines) + sum(one.done() for one in asked) < len(bodies):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        engine.hold.set()
        return sorted(one.result()[0] for one in asked)


def test_a_request_that_was_handed_on_counts_once(house):
    house.engines["embed"].hold.clear()
    large = json.dumps({"model": "embedder", "input": "x" * 200_000}).encode()
    assert answered(house, [large] * 40) == [200] * 32 + [429] * 8


def test_limits_of_an_address_count_a_request_once(host: Host, nginx_with_names: None) -> None:
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(recording(host.paths.engine_socket(name)))
            for name in ("main", "embed")
        }
        prepare(host, "embed", NAMES["embed"])
        names = {"main": NAMES["main"], "embed": NAMES["embed"]}
        limits = {"max_connections": 6, "max_requests_per_s": 5}
        house = House(
            stack.enter_context(running(host, engine=False, names=names, **limits)), engines
        )
        engines["embed"].hold.clear()
        body = json.dumps({"model": "embedder"}).encode()
        assert answered(house, [body] * 9) == [200] * 6 + [429] * 3
        time.sleep(2.2)
        # One, and a burst of twice the rate.
        assert [house.raw(CHAT, body)[0] for _ in range(10)] == [200] * 10


def listed(*names: str) -> bytes:
    data = [{"id": name, "object": "model", "max_model_len": 4096} for name in names]
    return json.dumps({"object": "list", "data": data}).encode()


def test_the_list_of_models_is_that_of_all_services_that_answer(house):
    for name, engine in house.engines.items():
        engine.says = listed(*NAMES[name])

    def told() -> list[str]:
        status, said = house.ask("/v1/models", None)
        assert status == 200
        assert json.loads(said)["object"] == "list"
        return [one["id"] for one in json.loads(said)["data"]]

    assert told() == ["main-model", "alias", "embedder", "org/ranker", "ranker"]
    assert house.taken() == {name: ["/v1/models"] for name in NAMES}
    traffic.close("main", house.door.host.paths)
    assert told() == ["embedder", "org/ranker", "ranker"]
    house.door.host.paths.engine_socket("rank").unlink()
    assert told() == ["embedder"]
    for broken in (b"no json", b"[]", b'{"data": 7}', b""):
        house.engines["embed"].says = broken
        assert house.ask("/v1/models", None)[0] == 503
    traffic.close("embed", house.door.host.paths)
    traffic.close("rank", house.door.host.paths)
    assert house.ask("/v1/models", None)[0] == 503


def test_one_model_is_told_by_its_own_service(house):
    assert house.ask("/v1/models/embedder", None)[0] == 200
    assert house.taken() == {"embed": ["/v1/models/embedder"]}
    status, said = house.ask("/v1/models/nothing", None)
    assert (status, json.loads(said)["error"]["code"]) == (404, "model_not_found")


def test_pieces_of_an_answer_pass_as_they_come(host: Host, nginx_with_names: None) -> None:
    with ExitStack() as stack:
        embed = stack.enter_context(recording(host.paths.engine_socket("embed")))
        prepare(host, "embed", ["embedder"])
        names = {"main": ["main-model"], "embed": ["embedder"]}
        door = stack.enter_context(running(host, names=names))
        answer = long_answer(door)
        # While one streams, the other is asked through the same address.
        key = {"Authorization": f"Bearer {door.key}"}
        assert door.ask("/v1/embeddings", {"model": "embedder"}, **key)[0] == 200
        assert len(embed.taken()) == 1
        assert answer.readline() == b"\n"
        assert b"data: " in answer.readline()
        rest = answer.read()
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert door.ask(CHAT, QUESTION, **key)[0] == 200


def test_without_the_module_it_is_said_what_is_missing(host: Host, nginx_program) -> None:
    (host.paths.root / "usr/sbin").mkdir(parents=True)
    (host.paths.root / "usr/sbin/nginx").symlink_to(nginx_program)
    with pytest.raises(HostToolError, match="libnginx-mod-http-js"):
        nginx.config_text(host.gateway(names={"main": ["a"]}), host.paths)


def test_a_release_opens_with_the_names_it_answers_to(host: Host) -> None:
    release = host.release()
    with recording(host.paths.engine_socket("main")):
        traffic.open_for(release, host.paths)
    told = host.paths.traffic("main").read_text().splitlines()
    assert told == [release.name, *release_data()["names"]]
