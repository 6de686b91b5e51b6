"""Configurations for programs that distribute requests over the gateways of several hosts."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import yaml

from spark_deploy.cli.connection import Connection
from spark_deploy.cli.hosts import Target
from spark_deploy.config.errors import SparkError

Servers = Sequence[Connection]


@dataclass(frozen=True, slots=True)
class Router:
    instructions: str
    render: Callable[[Servers], Iterator[str]]


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
        raise SparkError.one(where, "the hosts serve different models", fix)
    if any(server.ca for server in servers):
        raise SparkError.one(where, "vllm-router cannot use a private CA", fix)
    urls = [server.base_url.removesuffix("/v1") for server in servers]
    argv = ["vllm-router", "--policy", "consistent_hash"]
    # By default, the router tries a request five times, but avoids a host only after ten failures.
    argv += ["--cb-failure-threshold", "3"]
    yield shlex.join([*argv, "--worker-urls", *urls])


ROUTERS: dict[str, Router] = {
    "litellm": Router(
        # The tested versions: LiteLLM 1.107.0 is listed as compromised.
        "save as litellm.yaml, run the exports in its comments, "
        "pip install 'litellm[proxy]==1.108.7', then: "
        "litellm --host 127.0.0.1 --port 4000 --config litellm.yaml",
        _render_litellm,
    ),
    "vllm-router": Router(
        "pip install vllm-router==0.1.17, then run the line; the router forwards the client's "
        "key, so set serve.api_key to the same key on all hosts",
        _render_vllm_router,
    ),
}


def model_names(host: Target) -> tuple[str, ...]:
    """Return the model names of all services; the main gateway accepts all of them."""
    main = host.settings
    services = (main, *map(main.service_settings, main.services))
    return tuple(name for settings in services for name in settings.serve.names_of(settings.model))
