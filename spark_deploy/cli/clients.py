"""The values that clients need to connect to a server, and setups for kinds of clients."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from spark_deploy.config.errors import SparkError
from spark_deploy.plan.gateway import CONTAINER_NAME

QUESTION = "What is 7823 * 4519?"
_WEBUI_IMAGE, _WEBUI_PORT = "ghcr.io/open-webui/open-webui:main", 3000
_OPENCODE_ANSWER_TOKENS = 32_000


@dataclass(frozen=True, slots=True)
class Connection:
    host: str
    base_url: str
    port: int
    users: str  # who can use the URL
    model: str
    names: tuple[str, ...]
    key_path: str
    read_key: str
    tunnel: str | None  # a command that forwards a local port to the host
    ca: str | None  # a CA file for clients
    container: str | None  # base URL for containers on the host
    example: str  # a command that sends a request
    context_tokens: int | None = None  # maximum per request, if known
    task: str = "chat"


def connection_lines(server: Connection) -> Iterator[str]:
    yield f"{server.host}:"
    aliases = f" (also {', '.join(server.names[1:])})" if server.names[1:] else ""
    yield f"  base URL   {server.base_url} ({server.users})"
    if server.container:
        yield f"  containers {server.container}, on this host, with"
        yield f"             docker run --add-host {CONTAINER_NAME}:host-gateway ..."
    yield f"  model      {server.model}{aliases}"
    yield f"  API key    {server.key_path} on the host"
    yield f"  read key   {server.read_key}"
    if server.ca:
        yield f"  CA         {server.ca} on this machine, created by the first deploy; for clients:"
        yield f"             curl --cacert {server.ca}; Python: SSL_CERT_FILE={server.ca}"
    if server.tunnel:
        yield f"  tunnel     {server.tunnel}"
    yield f"  try        {server.example}"


# Path and body of an example request for each model task.
_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    "completion": ("completions", {"prompt": "The capital of France is", "max_tokens": 9}),
    "embedding": ("embeddings", {"input": QUESTION}),
    "reranking": ("rerank", {"query": QUESTION, "documents": ["a number", "a city"]}),
    "classification": ("classify", {"input": QUESTION}),
}


def example(base_url: str, model: str, read_key: str, ca: str | None, task: str = "chat") -> str:
    path, content = _REQUESTS[task]
    body = {"model": model, **content}
    ca_option = f"--cacert {shlex.quote(ca)} " if ca else ""
    # curl reads the header from stdin, because every user on this machine can read argv.
    return (
        f"{read_key} | sed 's/^/Authorization: Bearer /' | "
        f"curl -s {ca_option}{base_url}/{path} -H @- "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def _exports(**values: str) -> Iterator[str]:
    yield from (f"export {name}={shlex.quote(value)}" for name, value in values.items())


def _key_export(name: str, server: Connection) -> str:
    return f'export {name}="$({server.read_key})"'


def _render_env(server: Connection) -> Iterator[str]:
    yield from _exports(OPENAI_BASE_URL=server.base_url, OPENAI_MODEL=server.model)
    yield _key_export("OPENAI_API_KEY", server)
    if server.ca:
        yield from _exports(SSL_CERT_FILE=server.ca)


def _render_claude(server: Connection) -> Iterator[str]:
    yield from _exports(ANTHROPIC_BASE_URL=server.base_url.removesuffix("/v1"))
    yield _key_export("ANTHROPIC_AUTH_TOKEN", server)
    yield "unset ANTHROPIC_API_KEY"
    tiers = ("", "_DEFAULT_OPUS", "_DEFAULT_SONNET", "_DEFAULT_HAIKU")
    yield from _exports(
        **{f"ANTHROPIC{tier}_MODEL": server.model for tier in tiers},
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    if server.ca:
        yield from _exports(NODE_EXTRA_CA_CERTS=server.ca, SSL_CERT_FILE=server.ca)


def _render_python(server: Connection) -> Iterator[str]:
    yield "import os, subprocess"
    if server.ca:
        yield f"os.environ['SSL_CERT_FILE'] = {server.ca!r}"
    yield f"""from openai import OpenAI

read_key = {shlex.split(server.read_key)!r}
key = subprocess.check_output(read_key, text=True).strip()
client = OpenAI(base_url={server.base_url!r}, api_key=key)
answer = client.chat.completions.create(
    model={server.model!r},
    messages=[{{'role': 'user', 'content': {QUESTION!r}}}],
    stream=True,
)
for piece in answer:
    for choice in piece.choices:
        print(choice.delta.content or '', end='', flush=True)
print()"""


def _render_opencode(server: Connection) -> Iterator[str]:
    model_options = {}
    if context := server.context_tokens:
        # By default, opencode requests 32,000-token answers, which exceed small contexts.
        output = min(_OPENCODE_ANSWER_TOKENS, context // 4)
        model_options["limit"] = {"context": context, "output": output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": server.host,
        "options": {"baseURL": server.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {name: {"name": name, **model_options} for name in server.names},
    }
    schema, host = "https://opencode.ai/config.json", server.host.lstrip("@")
    config = {"$schema": schema, "model": f"{host}/{server.model}", "provider": {host: provider}}
    yield json.dumps(config, indent=2)


def _render_openwebui(server: Connection) -> Iterator[str]:
    yield _key_export("OPENAI_API_KEY", server)
    argv = ["docker", "run", "-d", "--name", "open-webui", "--network", "host"]
    # Listen only on loopback, because the first visitor becomes administrator and can use the key.
    argv += ["-e", "HOST=127.0.0.1", "-e", f"PORT={_WEBUI_PORT}"]
    argv += ["-e", f"OPENAI_API_BASE_URL={server.base_url}"]
    # Without a value, docker reads the key from the environment, which keeps it out of argv.
    argv += ["-e", "OPENAI_API_KEY", "-v", "open-webui:/app/backend/data"]
    if server.ca:
        container_path = "/etc/ssl/spark-ca.pem"
        argv += ["-v", f"{server.ca}:{container_path}:ro", "-e", f"SSL_CERT_FILE={container_path}"]
    yield shlex.join([*argv, _WEBUI_IMAGE])


CLIENTS: dict[str, tuple[str, Callable[[Connection], Iterator[str]]]] = {
    "openwebui": (
        f"run these lines on Linux, then open http://127.0.0.1:{_WEBUI_PORT}",
        _render_openwebui,
    ),
    "opencode": (
        "save as opencode.json; export the key with `--for env` before you start opencode",
        _render_opencode,
    ),
    "claude": ('eval "$(THIS)"; claude', _render_claude),
    "python": ("pip install openai; python FILE", _render_python),
    "curl": ("run this line", lambda server: iter([server.example])),
    "env": ('eval "$(THIS)"', _render_env),
}
# Clients whose setup is shell code that reads the key.
EXPORT_KEY = ("openwebui", "claude", "env")


# --- programs that distribute requests over the gateways of several hosts

Servers = Sequence[Connection]


def _render_litellm(servers: Servers) -> Iterator[str]:
    deployments = []
    for number, server in enumerate(servers, 1):
        yield f'# export SPARK_KEY_{number}="$({server.read_key})"'
        key = f"os.environ/SPARK_KEY_{number}"
        deployments += [
            {
                "model_name": name,
                "litellm_params": {
                    "model": f"hosted_vllm/{name}",
                    "api_base": server.base_url,
                    "api_key": key,
                },
            }
            for name in server.names
        ]
    for ca in {server.ca for server in servers if server.ca}:
        yield f"# export SSL_CERT_FILE={shlex.quote(ca)}"
    # Without a master key, LiteLLM answers any client.
    yield '# export LITELLM_MASTER_KEY="sk-$(openssl rand -hex 24)"'
    document = {
        "model_list": deployments,
        # Otherwise all retries may go to the host that just returned 503.
        "router_settings": {"allowed_fails": 0, "cooldown_time": 10},
        "general_settings": {"master_key": "os.environ/LITELLM_MASTER_KEY"},
    }
    yield yaml.safe_dump(document, sort_keys=False).rstrip()


def _render_vllm_router(servers: Servers) -> Iterator[str]:
    where, fix = "--for vllm-router", "use --for litellm"
    if len({server.names for server in servers}) > 1:
        raise SparkError.single(where, "the hosts serve different models", fix)
    if any(server.ca for server in servers):
        raise SparkError.single(where, "vllm-router cannot use a private CA", fix)
    urls = [server.base_url.removesuffix("/v1") for server in servers]
    argv = ["vllm-router", "--policy", "consistent_hash"]
    # By default, the router tries a request five times, but avoids a host only after ten failures.
    argv += ["--cb-failure-threshold", "3"]
    yield shlex.join([*argv, "--worker-urls", *urls])


ROUTERS: dict[str, tuple[str, Callable[[Servers], Iterator[str]]]] = {
    "litellm": (
        # The tested versions: LiteLLM 1.107.0 is listed as compromised.
        "save as litellm.yaml, run the export lines in its comments, "
        "run pip install 'litellm[proxy]==1.108.7', "
        "then run litellm --host 127.0.0.1 --port 4000 --config litellm.yaml",
        _render_litellm,
    ),
    "vllm-router": (
        "run pip install vllm-router==0.1.17, then run this line; "
        "set the same serve.api_key on all hosts, because the router forwards the client's key",
        _render_vllm_router,
    ),
}
