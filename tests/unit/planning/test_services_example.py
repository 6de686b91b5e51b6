"""The example of docs/how-to/several-services.md fits on a Spark as it stands there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import yaml

from spark_deploy.config.catalog.anatomy import Anatomy, CacheLayers
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from tests.unit.planning.plans import PAYLOAD, made_up_lock

RERANKER = {
    "kind": "plain", "summary": "Ranks", "choose_when": "tests", "task": "reranking",
    "repository": "BAAI/bge-reranker-v2-m3",
}  # fmt: skip
# As large as they are published: 0.6 billion weights of 16 bit, and as many of 32 bit.
READ = {
    "jinaai/jina-embeddings-v5-text-small-retrieval": Anatomy(
        repository="", commit="", architecture="JinaEmbeddingsV5Model", model_type="qwen3",
        width=1024,
        weights={"BF16": 1_200_000_000}, context_tokens=32768,
        cache=(CacheLayers(kind="full", layers=28, token_bytes=4096),),
    ),
    "BAAI/bge-reranker-v2-m3": Anatomy(
        repository="", commit="", architecture="XLMRobertaForSequenceClassification",
        model_type="xlm-roberta", width=1024, weights={"F32": 2_270_000_000}, context_tokens=8192,
        cache=(),
    ),
}  # fmt: skip


def test_the_example_fits_on_one_spark(tmp_path: Path) -> None:
    page = (CHECKOUT / "docs/how-to/several-services.md").read_text()
    [choices] = [
        found
        for text in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
        if "model" in (found := yaml.safe_load(text))
    ]
    # The reranker is the one that the page has owners add.
    own = tmp_path / "catalog/models/bge-reranker-v2-m3.yml"
    own.parent.mkdir(parents=True)
    own.write_text(yaml.safe_dump(RERANKER))
    catalog = read_catalog(own=tmp_path)
    settings = load_hosts({"spark": ["a"]}, root=tmp_path, overrides=choices)["a"].settings
    lock = made_up_lock(settings, catalog)
    read = {
        repository: dataclasses.replace(
            one, repository=repository, commit=next(
                source.commit for source in lock.sources.values() if source.repo == repository
            ),
        )
        for repository, one in READ.items()
    }  # fmt: skip
    lock = dataclasses.replace(lock, anatomies={**lock.anatomies, **read})
    plan = plan_host(Request("a", settings, catalog, lock, PAYLOAD))
    names = plan.gateway.settings.names
    assert names is not None
    assert [names[one] for one in ("embed", "rerank")] == [("embedder",), ("reranker",)]
    assert sum(one.memory.needed_bytes for one in plan.served) <= plan.memory.total_bytes
