import asyncio
import json

import pytest
from spark_vllm.served_names import RequestDefaults, add_defaults

from spark_deploy.config.errors import PlanError
from spark_deploy.config.settings.service import RequestDefaults as Setting
from tests.unit.planning.plans import plan_of

DEFAULTS = {
    "fast": Setting(thinking=False, temperature=0.7, top_k=20).request,
    "deep": Setting(thinking=True).request,
}


def sent(body, *, chunks=1, kind="http", method="POST"):
    size = -(-len(body) // chunks) or 1
    parts = [body[start : start + size] for start in range(0, max(1, len(body)), size)]
    queue = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]
    queue.append({"type": "http.disconnect"})
    seen = {}

    async def engine(scope, receive, send):
        seen["body"], more = b"", True
        while more:
            message = await receive()
            seen["body"] += message["body"]
            more = message["more_body"]
        seen["length"] = dict(scope["headers"])[b"content-length"]
        seen["next"] = (await receive())["type"]

    async def receive():
        return queue.pop(0)

    length = str(len(body)).encode()
    scope = {"type": kind, "method": method, "headers": [(b"content-length", length)]}
    asyncio.run(RequestDefaults(engine)(scope, receive, None))
    return seen


@pytest.fixture(autouse=True)
def _defaults(monkeypatch):
    monkeypatch.setenv("SPARK_REQUEST_DEFAULTS", json.dumps(DEFAULTS))


@pytest.mark.parametrize("chunks", [1, 3])
def test_model_name_adds_its_defaults_to_the_request(chunks):
    body = {"model": "fast", "messages": [{"role": "user", "content": "Grüße"}], "stream": True}
    seen = sent(json.dumps(body).encode(), chunks=chunks)
    assert json.loads(seen["body"]) == {
        **body, "temperature": 0.7, "top_k": 20,
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert int(seen["length"]) == len(seen["body"])
    assert seen["next"] == "http.disconnect"


def test_request_values_override_defaults():
    own = {
        "model": "fast",
        "temperature": 0,
        "chat_template_kwargs": {"a": 1, "enable_thinking": True},
    }
    merged = json.loads(sent(json.dumps(own).encode())["body"])
    assert merged == {**own, "top_k": 20}


@pytest.mark.parametrize(
    "body",
    [b'{"model": "other"}', b'{"model": ["fast"]}', b'{"n": 1}', b"[]", b"fast", b"", b"\xff{"],
)
def test_requests_for_other_models_are_unchanged(body):
    assert sent(body)["body"] == body
    assert add_defaults(body, {}) == body


def test_requests_with_other_http_methods_are_unchanged():
    assert sent(b'{"model": "fast"}', method="GET")["body"] == b'{"model": "fast"}'


def test_plan_passes_the_request_defaults_of_each_model_name():
    chosen = {"fast": {"thinking": False}, "qwen": {"temperature": 0.6}}
    serve = plan_of(**{"serve.names": ["qwen"], "serve.defaults": chosen}).release
    assert serve.names == ("qwen", "fast")
    assert serve.engine.argv[-2:] == ("--middleware", "spark_vllm.served_names.RequestDefaults")
    assert json.loads(serve.engine.env["SPARK_REQUEST_DEFAULTS"]) == {
        "fast": {"chat_template_kwargs": {"enable_thinking": False}}, "qwen": {"temperature": 0.6},
    }  # fmt: skip
    assert "--middleware" not in plan_of().release.engine.argv


def test_rejects_defaults_without_the_plugin():
    with pytest.raises(PlanError, match=r"serve\.defaults: profile base lacks the plugin"):
        plan_of(profile="base", **{"serve.defaults": {"fast": {"thinking": False}}})
