import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gateway_client
import pytest
from gateway_client import (
    CHAT,
    MIB,
    NAMES,
    QUESTION,
    open_service,
    recording,
    recording_gateway,
    running_gateway,
)
from spark_contract import files
from spark_contract.tool import HostToolError
from spark_host.gateway import gateway, nginx
from stub_host import wait_until

from tests.nginx import MODULE

EMBEDDINGS = "/v1/embeddings"


def test_model_name_selects_the_engine(services):
    engines = {"main-model": "main", "alias": "main", "embedder": "embed", "org/ranker": "rank"}
    for model, service in engines.items():
        for path in (CHAT, EMBEDDINGS, "/v1/rerank", "/v1/messages"):
            assert services.status(path, {"messages": [], "model": model}) == 200
            assert services.received() == {service: [path]}


def test_path_selects_the_engine_if_the_request_has_no_model_name(services):
    for body in ({}, {"model": None}, {"model": 3}, [], "model", {"a": {"model": "embedder"}}):
        assert services.status(CHAT, body) == 200
        assert services.received() == {"main": [CHAT]}
        assert services.status(EMBEDDINGS, body) == 200
        assert services.received() == {"embed": [EMBEDDINGS]}
    assert services.status(CHAT, b"") == 200
    assert services.status(CHAT, b'{"model": "embedder') == 200
    assert services.received() == {"main": [CHAT, CHAT]}


def test_path_selects_the_engine_if_no_model_names_are_configured(nginx_host):
    body = {"model": "embedder"}
    with recording_gateway(nginx_host, ("main", "embed"), routes={EMBEDDINGS: "embed"}) as client:
        for path in (EMBEDDINGS, CHAT, "/v1/rerank"):
            assert client.status(path, body) == 200
        assert client.received() == {"embed": [EMBEDDINGS], "main": [CHAT, "/v1/rerank"]}

        assert client.status(EMBEDDINGS, body, key=None) == 401
        assert client.status(EMBEDDINGS, method="GET") == 405
        gateway.close_traffic("embed", nginx_host.paths)
        assert (client.status(EMBEDDINGS, body), client.status(CHAT, body)) == (503, 200)
        gateway.close_traffic("main", nginx_host.paths)
        assert client.status(CHAT, body) == 503
        assert client.received() == {"main": [CHAT]}


def test_unknown_model_name_returns_404(services):
    status, text = services.ask(CHAT, {"model": 'gpt-"5"\u00e9', "messages": []})
    error = json.loads(text)["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert 'gpt-"5"\u00e9' in error["message"]
    status, text = services.ask(CHAT, {"model": "x" * MIB, "messages": []})
    assert (status, len(text) < 600) == (404, True)
    assert services.status("/v1/models/nothing") == 404
    assert services.received() == {}


def test_forwards_path_query_and_body_unchanged(services):
    body = json.dumps({"input": 'Wörter\n"quoted"', "model": "embedder"}).encode()
    assert services.status(f"{EMBEDDINGS}?a=%2F&b=1", body) == 200
    assert services.received() == {"embed": [f"{EMBEDDINGS}?a=%2F&b=1"]}
    assert services.engines["embed"].last_body == body
    assert services.status("/v1/classify", {"model": "ranker"}) == 200
    assert services.received() == {"rank": ["/classify"]}
    assert services.status("/v1/models/embedder") == 200
    assert services.received() == {"embed": ["/v1/models/embedder"]}


def test_key_and_allow_list_apply_with_several_services(services):
    body = {"model": "embedder"}
    assert services.status(CHAT, body, key=None) == 401
    assert services.status("/v1/models", key=None) == 401
    assert services.status(CHAT, method="GET") == 405
    internal = ("/by-name", "/by-name-large", "/engine/embed", "/engine/main", "/engine")
    for prefix in (*internal, "//engine/embed", "/x/../engine/embed", "/%65ngine/embed"):
        for path in (CHAT, "/metrics", "/v1/models", "/../../metrics", "/tokenize"):
            assert services.status(prefix + path, body) in (400, 404)
            assert services.status(prefix + path) in (400, 404)
    for path in ("/metrics", "/tokenize", "/v1/chat/completions/render", "/v1/load_lora_adapter"):
        assert services.status(path, body) == 404
    assert services.received() == {}


def test_closed_service_returns_503_while_other_services_answer(services):
    paths = services.host.paths
    gateway.close_traffic("embed", paths)
    with services.send(CHAT, {"model": "embedder"}) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
    assert services.status(CHAT, {"model": "main-model"}) == 200
    gateway.close_traffic("main", paths)
    assert services.status(CHAT, {"model": "ranker"}) == 200
    assert services.received() == {"main": [CHAT], "rank": [CHAT]}
    open_service(services.host, "embed")
    assert services.status(CHAT, {"model": "embedder"}) == 200
    paths.engine_socket("embed").unlink()
    assert services.status(CHAT, {"model": "embedder"}) == 503


def test_older_release_is_routed_by_the_model_names_it_serves(services):
    open_service(services.host, "embed", "aaaaaaaaaaaa", names=["before"])
    assert services.status(CHAT, {"model": "before"}) == 200
    assert services.status(CHAT, {"model": "embedder"}) == 404
    # Older tools wrote no names.
    files.write_text(services.host.paths.traffic("embed"), "embed-0123456789ab\n")
    assert services.status(CHAT, {"model": "embedder"}) == 200
    assert services.received() == {"embed": [CHAT, CHAT]}


def send_together(client, body, count):
    engine = client.engines["embed"]
    engine.may_answer.clear()
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(client.status, CHAT, body) for _ in range(count)]
        wait_until(
            lambda: len(engine.lines) + sum(answer.done() for answer in answers) >= count,
            "all requests arrived",
        )
        engine.may_answer.set()
        return sorted(answer.result() for answer in answers)


def test_large_bodies_are_counted_once(services):
    large = {"model": "embedder", "input": "x" * 200_000}
    assert send_together(services, large, 40) == [200] * 32 + [429] * 8


@pytest.mark.slow
def test_client_limits_count_a_request_once(js_host):
    names = {name: NAMES[name] for name in ("main", "embed")}
    limits = {"max_connections": 6, "max_requests_per_s": 5}
    with recording_gateway(js_host, ("main", "embed"), names=names, **limits) as client:
        body = {"model": "embedder"}
        assert send_together(client, body, 9) == [200] * 6 + [429] * 3
        time.sleep(2.2)
        assert [client.status(CHAT, body) for _ in range(10)] == [200] * 10


def test_model_list_covers_all_open_services(services):
    paths = services.host.paths
    for service, engine in services.engines.items():
        models = [{"id": name, "max_model_len": 4096} for name in NAMES[service]]
        engine.answer = json.dumps({"object": "list", "data": models}).encode()

    def listed():
        return [model["id"] for model in json.loads(services.ask("/v1/models")[1])["data"]]

    assert listed() == ["main-model", "alias", "embedder", "org/ranker", "ranker"]
    assert services.received() == {name: ["/v1/models"] for name in NAMES}
    gateway.close_traffic("main", paths)
    assert listed() == ["embedder", "org/ranker", "ranker"]
    paths.engine_socket("rank").unlink()
    assert listed() == ["embedder"]
    for malformed in (b"no json", b"[]", b'{"data": 7}', b""):
        services.engines["embed"].answer = malformed
        assert services.status("/v1/models") == 503
    gateway.close_traffic("embed", paths)
    gateway.close_traffic("rank", paths)
    assert services.status("/v1/models") == 503


@pytest.mark.slow
def test_answers_are_streamed_if_the_model_name_selects_the_service(js_host):
    with recording(js_host.paths.engine_socket("embed")) as embed:
        embed_settings = js_host.paths.gateway_settings("embed")
        embed_settings.parent.mkdir(parents=True, exist_ok=True)
        embed_settings.write_text(files.documents.to_json(js_host.gateway()))
        open_service(js_host, "embed")
        names = {"main": ["main-model"], "embed": ["embedder"]}
        with running_gateway(js_host, names=names) as client:
            answer = client.start_long_answer()
            assert client.status(EMBEDDINGS, {"model": "embedder"}) == 200
            assert len(embed.take_lines()) == 1
            assert answer.readline() == b"\n"
            assert b"data: " in answer.readline()
            assert answer.read().rstrip().endswith(b"data: [DONE]")
            assert client.status(CHAT, QUESTION) == 200


def test_error_names_the_missing_nginx_module(nginx_host):
    (nginx_host.paths.root / "usr/lib/nginx/modules" / MODULE).unlink()
    with pytest.raises(HostToolError, match="libnginx-mod-http-js"):
        nginx.render_config(nginx_host.gateway(names={"main": ["a"]}), nginx_host.paths)


def test_engine_cannot_redirect_inside_the_gateway(services, monkeypatch):
    for target in ("/refused/key", "/engine/embed/v1/models"):
        head = b"HTTP/1.1 200 OK\r\nX-Accel-Redirect: %s\r\n" % target.encode()
        monkeypatch.setattr(
            gateway_client, "HEAD", head + b"Content-Length: %d\r\nConnection: close\r\n\r\n"
        )
        assert services.ask(CHAT, QUESTION) == (200, b"ok")
        assert services.received() == {"main": [CHAT]}


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


def test_buffered_request_bodies_are_deleted_after_the_request(services):
    folder = services.host.paths.gateway_bodies("main") / "body"
    for _ in range(3):
        assert services.status(CHAT, {"messages": ["x" * MIB], "model": "ranker"}) == 200
    wait_until(lambda: not [path for path in folder.rglob("*") if path.is_file()], "removal")


def test_start_removes_request_bodies_left_by_a_killed_gateway(js_host):
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
def test_model_name_scanner_agrees_with_pythons_json_parser(services):
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


def test_model_name_scanner_ignores_text_that_is_not_json(services):
    for body in (b"\xff\xfe{", b"[" * 200_000, b'{"model"' * 20_000, b"\x00" * 200_000, b"}" * 9):
        assert services.status(CHAT, body) == 200
        assert services.received() == {"main": [CHAT]}


@pytest.mark.slow
def test_model_name_scanner_uses_constant_memory(services):
    def worker_bytes():
        master = services.process.pid
        pids = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(int(re.findall(r"RssAnon:\s+(\d+)", text)[0]) << 10 for text in texts)

    before = worker_bytes()
    for body in (b'{"a":' + b"[" * 4 * MIB, json.dumps({"a": list(range(500_000))}).encode()):
        assert services.status(CHAT, body) == 200
    assert worker_bytes() - before < 16 * MIB
