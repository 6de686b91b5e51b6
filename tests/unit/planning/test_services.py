import json
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from spark_contract.documents import parse, to_json
from spark_contract.release import Release, parse_service

from spark_deploy.cli.plan_text import plan_lines
from spark_deploy.config.catalog.architecture import CacheLayers, RepoMetadata
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import GIB
from spark_deploy.config.errors import SparkError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.plan.gateway import base_urls, gateway_plan
from spark_deploy.plan.host import plan_document, plan_host
from spark_deploy.plan.jobs import keep_list, served_jobs
from spark_deploy.plan.memory import gib
from spark_deploy.plan.release import release_files
from spark_deploy.plan.resolve import Request, model_and_profile
from tests.unit.planning.plans import (
    CATALOG,
    PAYLOAD,
    made_up_lock,
    plan_of,
    problems,
    settings_of,
)

SMALL: dict[str, Any] = {
    "model": "small", "profile": "base", "port": 8001, "memory_gib": 24,
    "engine": {"max_context_tokens": 16384},
}  # fmt: skip
SHORT = {"engine.max_context_tokens": 32768}


def with_services(**services):
    return plan_of(services=services, **SHORT)


def test_each_service_has_its_own_files_gateway_and_release():
    plan = with_services(embed=SMALL)
    main, embed = plan.served
    assert [parse_service(service.release.name) for service in plan.served] == ["main", "embed"]
    assert (embed.model, embed.profile) == ("small", "base")
    assert (main.gateway.settings.port, embed.gateway.settings.port) == (8000, 8001)
    assert embed.gateway.settings.path.endswith("/embed.json")
    main_paths, embed_paths = (
        {file.path for file in release_files(service)} for service in plan.served
    )
    assert not main_paths & embed_paths
    assert parse(Release, to_json(embed.release)) == embed.release
    assert json.loads(json.dumps(plan_document(plan)))["services"]


def test_services_share_memory():
    alone, plan = plan_of(**SHORT), with_services(embed=SMALL)
    total, [embed] = plan.memory.total_bytes, plan.services
    assert plan.memory.needed_bytes < alone.memory.needed_bytes
    assert plan.memory.memory_fraction < alone.memory.memory_fraction
    engines = sum(service.memory.memory_fraction for service in plan.served)
    assert engines * total <= total - 12 * GIB + 0.01 * total
    argv = embed.release.engine.argv
    assert float(argv[argv.index("--gpu-memory-utilization") + 1]) * total <= 24 * GIB
    needed = sum(service.memory.needed_bytes for service in plan.served)
    assert plan.preflight.memory_needed_bytes == needed


def test_printed_plan_includes_the_kv_cache_of_each_service():
    plan, settings = with_services(embed=SMALL), settings_of(services={"embed": SMALL}, **SHORT)
    lines = plan_lines(plan, *model_and_profile(settings, CATALOG))
    _, service = (line for line in lines if line.startswith("  memory "))
    memory = plan.services[0].memory
    assert gib(memory.kv_cache_bytes) in service
    assert f"{memory.kv_tokens:,} tokens" in service


def test_on_demand_services_share_memory():
    larger = {**SMALL, "memory_gib": 26}
    first = {**larger, "start": "on-request", "idle_stop_s": 900}
    second = {**SMALL, "start": "on-request", "port": 8002, "names": ["second"]}
    plan, alone = with_services(first=first, second=second), with_services(first=larger)
    assert plan.memory == alone.memory
    assert plan.preflight.memory_needed_bytes == alone.preflight.memory_needed_bytes
    gateways = [service.gateway.settings.on_request for service in plan.served]
    assert gateways == [{"first": 900, "second": 0}, {"first": 900}, {"second": 0}]
    assert plan.release == alone.release
    assert plan.services[0].release == alone.services[0].release
    assert alone.gateway.settings.on_request is None


def test_changing_a_service_does_not_change_the_main_release():
    plan = with_services(embed=SMALL)
    changed = with_services(embed={**SMALL, "names": ["vectors"], "port": 8002})
    assert plan.release == changed.release
    assert plan.services[0].release != changed.services[0].release


def problems_with(memory_gib):
    return problems(services={"embed": {**SMALL, "memory_gib": memory_gib}}, **SHORT)


def test_suggests_sufficient_memory_for_a_service():
    [problem] = problems_with(3)
    assert problem.where == "services.embed"
    enough = float(problem.fix.split("memory_gib to ")[1].split(",")[0])
    assert problems_with(enough) == []
    assert problems_with(enough - 1.3) != []


def test_suggests_less_memory_for_services_if_main_does_not_fit():
    [problem] = [p for p in problems_with(90) if "does not fit on one host" in p.what]
    match = re.search(r"lower services\.embed\.memory_gib to (\d+) together", problem.fix)
    assert match is not None, problem.fix
    assert problems_with(int(match[1])) == []
    assert problems_with(int(match[1]) + 1) != []


def test_ports_of_all_services_are_checked_and_their_files_are_kept():
    plan = with_services(embed=SMALL)
    assert plan.preflight.ports == (8000, 8001)
    keep = keep_list(plan)
    assert set(keep.releases) == {service.release.name for service in plan.served}
    assert plan.services[0].served_checkpoint.dir in keep.folders
    titles = [work.job.title for work in served_jobs(plan, ())]
    assert len(titles) == len(set(titles))
    for service in plan.served:
        assert any(service.sources[0].locked.repo in title for title in titles)


@pytest.mark.parametrize(
    ("services", "where", "what"),
    [
        ({"main": SMALL}, "services.main", "reserved for the main service"),
        ({"a": {**SMALL, "port": 8000}}, "services.a.port", "is already set in serve.port"),
        ({"a": SMALL, "b": SMALL}, "services.b.port", "is already set in services.a.port"),
        ({"a": {**SMALL, "memory_gib": 1}}, "services.a.memory_gib", "is less than 1 %"),
        ({"a": {**SMALL, "model": "smal"}}, "services.a.model", "did you mean small?"),
        ({"a": {**SMALL, "engine": {"options": {"port": 1}}}}, "services.a.engine.options", ""),
        ({"a": {**SMALL, "names": ["v", "large"]}}, "services.a.names", "large"),
        ({"A b": SMALL}, "services", "A b"),
        ({"a": {**SMALL, "paths": ["/metrics"]}}, "services.a.paths", "/metrics"),
        (
            {
                "a": {**SMALL, "paths": ["/v1/score"]},
                "b": {**SMALL, "port": 8002, "paths": ["/v1/score"]},
            },
            "services.b.paths",
            "is already served by services.a",
        ),
    ],
)
def test_rejects_conflicting_services(services, where, what):
    with pytest.raises(SparkError) as error:
        with_services(**services)
    text = " ".join(problem.line for problem in error.value.problems)
    assert where in text
    assert what in text


def test_main_gateway_routes_paths_and_model_names():
    plan = with_services(embed={**SMALL, "paths": ["/v1/embeddings"], "names": ["vectors", "v"]})
    main, embed = (service.gateway.settings for service in plan.served)
    assert (main.routes, embed.routes) == ({"/v1/embeddings": "embed"}, {})
    assert main.names == {"main": plan.release.names, "embed": ("vectors", "v")}
    assert embed.names is None
    assert parse(type(main), to_json(main)) == main
    alone = plan_of(**SHORT)
    assert alone.gateway.settings.names is None
    module = "libnginx-mod-http-js"
    assert [module in p.base.packages for p in (plan, alone)] == [True, False]
    assert plan.release == with_services(embed=SMALL).release


@pytest.mark.parametrize(
    ("host", "settings", "address", "url"),
    [
        ("a", {}, "a", None),
        ("@local", {}, None, None),
        ("a", {"serve.expose": "docker"}, "a", "http://host.docker.internal:8000/v1"),
        ("a", {"serve.expose": "tailscale"}, None, "http://TAILSCALE-ADDRESS:8000/v1"),
        ("a", {"serve.expose": "tailscale", "serve.address": "b"}, "b", "http://b:8000/v1"),
        ("@local", {"serve.expose": "lan"}, None, "http://ADDRESS:8000/v1"),
        ("a", {"serve.expose": "lan", "serve.port": 9000}, "a", "http://a:9000/v1"),
        ("a", {"serve.expose": "lan", "ssh.hostname": "fd00::7"}, "fd00::7",
         "http://[fd00::7]:8000/v1"),
        ("a", {"serve.expose": "lan", "ssh.hostname": "b", "serve.address": "c"}, "c",
         "http://c:8000/v1"),
    ],
)  # fmt: skip
def test_clients_get_an_address_in_their_network(host, settings, address, url):
    plan = gateway_plan(settings_of(**settings), host)
    assert (plan.address, plan.tls, plan.settings.tls) == (address, None, None)
    local, *remote = base_urls(plan)
    assert local[0] == f"http://127.0.0.1:{plan.settings.port}/v1"
    assert [entry[0] for entry in remote] == ([url] if url else [])


@pytest.mark.parametrize(("host", "names"), [("a", ("b", "a", "c")), ("@local", ("b", "c"))])
def test_certificates_cover_the_hostname_the_address_and_listed_names(host, names):
    settings = settings_of(**{
        "serve.expose": "lan", "serve.tls": "private-ca", "serve.address": "b",
        "serve.tls_names": ["c", "b"],
    })  # fmt: skip
    plan = gateway_plan(settings, host)
    assert plan.settings.tls is not None
    assert (plan.tls.mode, plan.tls.names) == ("private-ca", names)
    assert [url for url, _ in base_urls(plan)] == [
        "http://127.0.0.1:8000/v1", "https://b:8000/v1",
    ]  # fmt: skip
    assert gateway_plan(settings, host, "embed").settings.replicas is None


def test_own_certificate_and_key_are_read_from_the_named_files():
    plan = gateway_plan(settings_of(**{
        "serve.expose": "lan", "serve.tls": "own-cert", "serve.tls_certificate": "/c.pem",
        "serve.tls_key": "/k.pem",
    }), "a")  # fmt: skip
    assert (plan.tls.certificate, plan.tls.key) == ("/c.pem", "/k.pem")


RERANKER = {
    "kind": "plain", "summary": "Ranks", "choose_when": "tests", "task": "reranking",
    "repository": "BAAI/bge-reranker-v2-m3",
}  # fmt: skip
# As large as published: 0.6 billion weights of 16 bits, and as many of 32 bits.
REPO_METADATA = {
    "jinaai/jina-embeddings-v5-text-small-retrieval": RepoMetadata(
        repository="", commit="", architecture="JinaEmbeddingsV5Model", model_type="qwen3",
        width=1024,
        weights={"BF16": 1_200_000_000}, context_tokens=32768,
        cache=(CacheLayers(kind="full", layers=28, token_bytes=4096),),
    ),
    "BAAI/bge-reranker-v2-m3": RepoMetadata(
        repository="", commit="", architecture="XLMRobertaForSequenceClassification",
        model_type="xlm-roberta", width=1024, weights={"F32": 2_270_000_000}, context_tokens=8192,
        cache=(),
    ),
}  # fmt: skip


def test_documented_example_of_several_services_fits_on_one_spark(tmp_path):
    page = (CHECKOUT / "docs/how-to/several-services.md").read_text()
    blocks = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S))
    [overrides] = [block for block in blocks if "model" in block]
    own = tmp_path / "catalog/models/bge-reranker-v2-m3.yml"
    own.parent.mkdir(parents=True)
    own.write_text(yaml.safe_dump(RERANKER))
    catalog = read_catalog(user_dir=tmp_path)
    settings = load_hosts({"spark": ["a"]}, root=tmp_path, overrides=overrides)["a"].settings
    lock = made_up_lock(settings, catalog)
    commits = {source.repo: source.commit for source in lock.sources.values()}
    repo_metadata = {
        repository: replace(metadata, repository=repository, commit=commits[repository])
        for repository, metadata in REPO_METADATA.items()
    }
    lock = replace(lock, repo_metadata={**lock.repo_metadata, **repo_metadata})
    plan = plan_host(Request("a", settings, catalog, lock, PAYLOAD))
    names = plan.gateway.settings.names
    assert (names["embed"], names["rerank"]) == (("embedder",), ("reranker",))
    needed = sum(service.memory.needed_bytes for service in plan.served)
    assert needed <= plan.memory.total_bytes
