"""Print what vLLM's three APIs read of requests to two names; run by the engine's Python."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

FAST = {"temperature": 0.7, "top_k": 20, "chat_template_kwargs": {"enable_thinking": False}}
MESSAGES = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5}
REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, MESSAGES),
    "/v1/responses": (ResponsesRequest, {"input": "?"}),
    "/v1/messages": (AnthropicMessagesRequest, MESSAGES),
}

app = FastAPI()
for path, (kind, _) in REQUESTS.items():

    def read(request: Any) -> list[Any]:
        return [getattr(request, name) for name in ("temperature", "top_k", "chat_template_kwargs")]

    read.__annotations__["request"] = kind
    app.post(path)(read)
os.environ["SPARK_REQUEST_DEFAULTS"] = json.dumps({"fast": FAST})
everyone = {"allowed_origins": ["*"], "allowed_methods": ["*"], "allowed_headers": ["*"]}
options = Namespace(
    **everyone, allow_credentials=False, api_key=None, enable_request_id_headers=False,
    middleware=["spark_vllm.served_names.RequestDefaults"],
)  # fmt: skip
init_entrypoints_middleware(options, app, ())
client = TestClient(app)
answers = [
    [client.post(path, json={"model": name, **body}).json() for name in ("fast", "deep")]
    for path, (_, body) in REQUESTS.items()
]
sys.stdout.write(f"answers:{json.dumps(answers)}")
