"""A gateway reads bodies of any size and form for the name of a model, and hands them on whole."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from gateway_house import CHAT, MIB, NAMES
from recorder import recording
from stub_gateway import running
from stub_host import Host


@pytest.mark.parametrize("size", [90_000, 99_999, 100_000, 131_072, 7 * MIB])
@pytest.mark.parametrize("first", [True, False])
def test_bodies_of_any_size_are_routed_and_forwarded(house, size, first):
    text = random.Random(size).choices('ab\\"\n{}[]:,é', k=1000)
    long = ("".join(text) * (size // 1000))[: size // 2]
    items = [("model", "embedder"), ("messages", [{"content": long, "model": "main-model"}])]
    body = json.dumps(dict(items if first else items[::-1])).encode()
    body += b" " * max(0, size - len(body))
    assert house.raw(CHAT, body)[0] == 200
    assert house.taken() == {"embed": [CHAT]}
    assert house.engines["embed"].last == body


def test_chunked_bodies_are_routed(house):
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


def test_bodies_are_removed_from_disk(house):
    folder = house.door.host.paths.gateway_bodies("main") / "body"
    body = json.dumps({"messages": ["x" * MIB], "model": "ranker"}).encode()
    for _ in range(3):
        assert house.raw(CHAT, body)[0] == 200
    deadline = time.monotonic() + 10
    while kept := [one for one in folder.rglob("*") if one.is_file()]:
        assert time.monotonic() < deadline, kept
        time.sleep(0.05)


def test_start_removes_bodies_of_a_killed_gateway(host: Host, nginx_with_names: None) -> None:
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


def test_model_name_scanner_agrees_with_python(house):
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


def test_scanner_ignores_text_that_is_not_json(house):
    for body in (b"\xff\xfe{", b"[" * 200_000, b'{"model"' * 20_000, b"\x00" * 200_000, b"}" * 9):
        assert house.raw(CHAT, body)[0] == 200
        assert house.taken() == {"main": [CHAT]}


def test_scanner_memory_is_constant(house):

    def kept() -> int:
        master = house.door.process.pid
        with open(f"/proc/{master}/task/{master}/children") as source:
            told = [Path(f"/proc/{pid}/status").read_text() for pid in source.read().split()]
        return sum(int(re.findall(r"RssAnon:\s+(\d+)", one)[0]) << 10 for one in told)

    before = kept()
    for body in (b'{"a":' + b"[" * 4 * MIB, json.dumps({"a": list(range(500_000))}).encode()):
        assert house.raw(CHAT, body)[0] == 200
    assert kept() - before < 16 * MIB
