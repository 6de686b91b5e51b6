import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import recording_engine
from gateway_client import (
    CHAT,
    MIB,
    NAMES,
    QUESTION,
    open_service,
    recording_gateway,
    running_gateway,
)
from recording_engine import recording
from spark_contract import files
from spark_contract.tool import HostToolError
from spark_host.gateway import gateway, nginx

from tests.nginx import MODULE

EMBEDDINGS = "/v1/embeddings"


def test_model_name_chooses_the_engine(services):
    engines = {"main-model": "main", "alias": "main", "embedder": "embed", "org/ranker": "rank"}
    for model, service in engines.items():
        for path in (CHAT, EMBEDDINGS, "/v1/rerank", "/v1/messages"):
            assert services.status(path, {"messages": [], "model": model}) == 200
            assert services.received() == {service: [path]}


def test_path_chooses_the_engine_without_model_name(services):
    for body in ({}, {"model": None}, {"model": 3}, [], "model", {"a": {"model": "embedder"}}):
        assert services.status(CHAT, body) == 200
        assert services.received() == {"main": [CHAT]}
        assert services.status(EMBEDDINGS, body) == 200
        assert services.received() == {"embed": [EMBEDDINGS]}
    assert services.status(CHAT, b"") == 200
    assert services.status(CHAT, b'{"model": "embedder') == 200
    assert services.received() == {"main": [CHAT, CHAT]}


def test_path_alone_chooses_the_engine_without_configured_names(nginx_host):
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


def test_closed_service_returns_503_and_others_answer(services):
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


def test_routes_older_release_by_the_names_it_serves(services):
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
        deadline = time.monotonic() + 20
        while len(engine.lines) + sum(answer.done() for answer in answers) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
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
def test_streams_answers_chosen_by_name(js_host):
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


def test_names_the_missing_nginx_module(nginx_host):
    (nginx_host.paths.root / "usr/lib/nginx/modules" / MODULE).unlink()
    with pytest.raises(HostToolError, match="libnginx-mod-http-js"):
        nginx.render_config(nginx_host.gateway(names={"main": ["a"]}), nginx_host.paths)


def test_engine_cannot_redirect_inside_the_gateway(services, monkeypatch):
    for target in ("/refused/key", "/engine/embed/v1/models"):
        head = b"HTTP/1.1 200 OK\r\nX-Accel-Redirect: %s\r\n" % target.encode()
        monkeypatch.setattr(
            recording_engine, "HEAD", head + b"Content-Length: %d\r\nConnection: close\r\n\r\n"
        )
        assert services.ask(CHAT, QUESTION) == (200, b"ok")
        assert services.received() == {"main": [CHAT]}
