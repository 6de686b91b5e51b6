"""A gateway of a host with several services: the model that a request names chooses among them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from gateway_house import CHAT, MIB, NAMES, House, open_again, prepare
from recorder import recording
from spark_contract import files
from spark_contract.errors import HostToolError
from spark_host.gateway import nginx, traffic
from stub_gateway import QUESTION, long_answer, running
from stub_host import Host, release_data


@pytest.mark.parametrize(
    ("model", "service"),
    [("main-model", "main"), ("alias", "main"), ("embedder", "embed"), ("org/ranker", "rank")],
)
def test_model_name_chooses_the_engine(house, model, service):
    for path in (CHAT, "/v1/embeddings", "/v1/rerank", "/v1/messages"):
        assert house.ask(path, {"messages": [], "model": model})[0] == 200
        assert house.taken() == {service: [path]}


def test_path_chooses_the_engine_without_model_name(house):
    for body in ({}, {"model": None}, {"model": 3}, [], "model", {"a": {"model": "embedder"}}):
        assert house.ask(CHAT, body)[0] == 200
        assert house.taken() == {"main": [CHAT]}
        assert house.ask("/v1/embeddings", body)[0] == 200
        assert house.taken() == {"embed": ["/v1/embeddings"]}
    assert house.raw(CHAT, b"")[0] == 200
    assert house.raw(CHAT, b'{"model": "embedder')[0] == 200
    assert house.taken() == {"main": [CHAT, CHAT]}


def test_unknown_model_name_returns_404(house):
    status, said = house.ask(CHAT, {"model": 'gpt-"5"\u00e9', "messages": []})
    error = json.loads(said)["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert 'gpt-"5"\u00e9' in error["message"]
    long = house.ask(CHAT, {"model": "x" * MIB, "messages": []})
    assert long[0] == 404
    assert len(long[1]) < 600
    assert house.taken() == {}


def test_path_query_and_body_are_forwarded_unchanged(house):
    body = json.dumps({"input": 'Wörter\n"quoted"', "model": "embedder"}).encode()
    assert house.raw("/v1/embeddings?a=%2F&b=1", body)[0] == 200
    assert house.taken() == {"embed": ["/v1/embeddings?a=%2F&b=1"]}
    assert house.engines["embed"].last == body
    # The engine's path differs, for each service.
    assert house.ask("/v1/classify", {"model": "ranker"})[0] == 200
    assert house.taken() == {"rank": ["/classify"]}


def test_key_and_allow_list_apply_with_several_services(house):
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


def test_closed_service_returns_503_and_others_answer(house):
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


def test_missing_engine_returns_503(house):
    house.door.host.paths.engine_socket("embed").unlink()
    status, headers, _ = house.door.ask(CHAT, {"model": "embedder"}, **house.key)
    assert (status, headers["Retry-After"]) == (503, "10")


def test_older_release_is_routed_by_its_own_names(house):
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
    with ThreadPoolExecutor(len(bodies)) as together:
        asked = [together.submit(house.raw, CHAT, body) for body in bodies]
        deadline = time.monotonic() + 20
        engine = house.engines["embed"]
        while len(engine.lines) + sum(one.done() for one in asked) < len(bodies):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        engine.hold.set()
        return sorted(one.result()[0] for one in asked)


def test_redirected_request_is_counted_once(house):
    house.engines["embed"].hold.clear()
    large = json.dumps({"model": "embedder", "input": "x" * 200_000}).encode()
    assert answered(house, [large] * 40) == [200] * 32 + [429] * 8


def test_limits_count_a_request_once(host: Host, nginx_with_names: None) -> None:
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
        # A request, and a burst of twice the rate.
        assert [house.raw(CHAT, body)[0] for _ in range(10)] == [200] * 10


def listed(*names: str) -> bytes:
    data = [{"id": name, "object": "model", "max_model_len": 4096} for name in names]
    return json.dumps({"object": "list", "data": data}).encode()


def test_model_list_covers_all_open_services(house):
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


def test_single_model_is_answered_by_its_service(house):
    assert house.ask("/v1/models/embedder", None)[0] == 200
    assert house.taken() == {"embed": ["/v1/models/embedder"]}
    status, said = house.ask("/v1/models/nothing", None)
    assert (status, json.loads(said)["error"]["code"]) == (404, "model_not_found")


def test_named_answers_are_streamed(host: Host, nginx_with_names: None) -> None:
    with ExitStack() as stack:
        embed = stack.enter_context(recording(host.paths.engine_socket("embed")))
        prepare(host, "embed", ["embedder"])
        names = {"main": ["main-model"], "embed": ["embedder"]}
        door = stack.enter_context(running(host, names=names))
        answer = long_answer(door)
        # While an answer streams, the second service answers.
        key = {"Authorization": f"Bearer {door.key}"}
        assert door.ask("/v1/embeddings", {"model": "embedder"}, **key)[0] == 200
        assert len(embed.taken()) == 1
        assert answer.readline() == b"\n"
        assert b"data: " in answer.readline()
        rest = answer.read()
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert door.ask(CHAT, QUESTION, **key)[0] == 200


def test_missing_nginx_module_is_named(host: Host, nginx_program) -> None:
    (host.paths.root / "usr/sbin").mkdir(parents=True)
    (host.paths.root / "usr/sbin/nginx").symlink_to(nginx_program)
    with pytest.raises(HostToolError, match="libnginx-mod-http-js"):
        nginx.config_text(host.gateway(names={"main": ["a"]}), host.paths)


def test_traffic_file_contains_the_model_names(host: Host) -> None:
    release = host.release()
    with recording(host.paths.engine_socket("main")):
        traffic.open_for(release, host.paths)
    told = host.paths.traffic("main").read_text().splitlines()
    assert told == [release.name, *release_data()["names"]]
