import json
import random
import re
import time
from pathlib import Path

import pytest
from gateway_client import CHAT, MIB, NAMES, recording_gateway


@pytest.mark.parametrize(
    "size", [90_000, 99_999, 100_000, 131_072, pytest.param(7 * MIB, marks=pytest.mark.slow)]
)
def test_routes_and_forwards_bodies_of_any_size(services, size):
    text = "".join(random.Random(size).choices('ab\\"\n{}[]:,é', k=1000))
    long = (text * (size // 1000))[: size // 2]
    fields = [("model", "embedder"), ("messages", [{"content": long, "model": "main-model"}])]
    for members in (fields, fields[::-1]):
        body = json.dumps(dict(members)).encode().ljust(size)
        assert services.status(CHAT, body) == 200
        assert services.received() == {"embed": [CHAT]}
        assert services.engines["embed"].last_body == body


def test_routes_chunked_bodies(services):
    body = json.dumps({"messages": ["x" * 300_000], "model": "ranker"}).encode()
    chunks = (body[at : at + 4096] for at in range(0, len(body), 4096))
    assert services.status(CHAT, chunks) == 200
    assert services.received() == {"rank": [CHAT]}
    assert services.engines["rank"].last_body == body


def test_rejects_body_over_the_limit(services):
    assert services.status(CHAT, b'{"model": "embedder", "a": "' + b"x" * 8 * MIB + b'"}') == 413
    assert services.received() == {}


def test_removes_stored_bodies_after_the_request(services):
    folder = services.host.paths.gateway_bodies("main") / "body"
    for _ in range(3):
        assert services.status(CHAT, {"messages": ["x" * MIB], "model": "ranker"}) == 200
    deadline = time.monotonic() + 10
    while stored := [path for path in folder.rglob("*") if path.is_file()]:
        assert time.monotonic() < deadline, stored
        time.sleep(0.05)


def test_start_removes_bodies_of_a_killed_gateway(js_host):
    body = js_host.paths.gateway_bodies("main") / "body/0000000007"
    body.parent.mkdir(parents=True)
    body.write_text("a secret")
    with recording_gateway(js_host, names=NAMES):
        assert not body.exists()


CHARACTERS = ['"', "\\", "a", "}", "{", "é", "😀", "\n", ":"]
KEYS = ["model", "model ", "Model", "a", 'model"', "\\model"]
SERVICE_OF = {"embedder": "embed", "ranker": "rank", "main-model": "main"}


def random_value(rng, depth):
    kind = rng.randrange(7 if depth < 4 else 4)
    if kind == 0:
        return rng.choice([None, True, -1.5e3, 7])
    if kind < 4:
        return "".join(rng.choices(CHARACTERS, k=5))
    items = range(rng.randrange(4))
    if kind == 4:
        return [random_value(rng, depth + 1) for _ in items]
    return {rng.choice(KEYS): random_value(rng, depth + 1) for _ in items}


def random_member(rng, key, value):
    text = json.dumps(key, ensure_ascii=rng.random() < 0.5)
    if key == "model" and rng.random() < 0.3:
        text = '"' + "".join(f"\\u{ord(letter):04x}" for letter in key) + '"'
    space = rng.choice(["", " ", "\n\t"])
    return f"{space}{text}{space}:{space}{json.dumps(value, indent=rng.choice([None, 2]))}"


def random_body(rng):
    members = [
        random_member(rng, rng.choice(KEYS), random_value(rng, 1)) for _ in range(rng.randrange(4))
    ]
    names = [rng.choice(list(SERVICE_OF)) for _ in range(rng.randrange(3))]
    members += [random_member(rng, "model", name) for name in names]
    if rng.random() < 0.1:
        members.append(random_member(rng, "input", "y" * 70_000 * rng.randrange(1, 3)))
    rng.shuffle(members)
    return "{" + ",".join(members) + "}"


@pytest.mark.slow
def test_model_name_scanner_agrees_with_python(services):
    rng, routed = random.Random(7), 0
    for _ in range(300):
        text = random_body(rng)
        model = json.loads(text).get("model")
        status = services.status(CHAT, text.encode())
        if isinstance(model, str) and model not in SERVICE_OF:
            assert (status, services.received()) == (404, {}), text[:500]
        else:
            service = SERVICE_OF.get(model, "main") if isinstance(model, str) else "main"
            assert services.received() == {service: [CHAT]}, text[:500]
            routed += service != "main"
    assert routed > 50


def test_scanner_ignores_text_that_is_not_json(services):
    for body in (b"\xff\xfe{", b"[" * 200_000, b'{"model"' * 20_000, b"\x00" * 200_000, b"}" * 9):
        assert services.status(CHAT, body) == 200
        assert services.received() == {"main": [CHAT]}


@pytest.mark.slow
def test_scanner_memory_is_constant(services):
    def worker_bytes():
        master = services.process.pid
        pids = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(int(re.findall(r"RssAnon:\s+(\d+)", text)[0]) << 10 for text in texts)

    before = worker_bytes()
    for body in (b'{"a":' + b"[" * 4 * MIB, json.dumps({"a": list(range(500_000))}).encode()):
        assert services.status(CHAT, body) == 200
    assert worker_bytes() - before < 16 * MIB
