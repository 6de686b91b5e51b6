"""``spark-deploy inspect``: what a repository holds, and which models of the catalog it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from spark_contract.documents import text_of
from spark_contract.orders import (
    AGAINST,
    INSPECT,
    JSON,
    WITH_DONOR,
    Base,
    BuildPlan,
    DonorDir,
    Scheme,
)

from spark_deploy.cli.hosts import listed
from spark_deploy.cli.options import Options
from spark_deploy.config.catalog.companions import HUB_REPOSITORY
from spark_deploy.config.catalog.model import HybridModel
from spark_deploy.config.documents.shown import shown
from spark_deploy.config.errors import CatalogError
from spark_deploy.lock.verify_names import workplace
from spark_deploy.plan.checkpoint import exact_sets


def run(options: Options) -> int:
    """Print what the headers of a repository say; no byte of its weights is read."""
    # Hosts of an inventory may differ in hub and catalog: the first one's are asked.
    host = listed(options, judged=False)[0]
    place = _place(options.place)
    with workplace(host.settings.settings.hub) as builder:
        words = [JSON] if options.json else []
        for model in host.catalog.models.values():
            for order in _orders(model) if isinstance(model, HybridModel) else ():
                name = f"{model.name}.{order.shared_experts}.json"
                (builder.folder / name).write_text(text_of(order), encoding="utf-8")
                words += [AGAINST, name]
        print(shown(builder.ask(INSPECT, *words, place)), end="")
    return 0


def _place(named: str) -> str:
    """Return what is to be looked at.

    Raises:
        CatalogError: it is neither a folder nor a repository, so no hub is asked for it.
    """
    if Path(named).is_dir():
        return str(Path(named).absolute())
    if not re.match(HUB_REPOSITORY["pattern"], named.partition("@")[0]):
        what = "is neither a directory nor org/name"
        raise CatalogError.one(named, what, "check the spelling")
    return named


def _orders(model: HybridModel) -> Iterator[BuildPlan]:
    """Yield an order for each part that a repository could be of a model."""
    yield _order(model, "keep")
    if model.sources.hybrid is not None:
        yield _order(model, "fp8-base")
    if model.sources.donor is not None:
        yield _order(model, "fp8-donor")


def _order(model: HybridModel, scheme: Scheme) -> BuildPlan:
    return BuildPlan(
        digest="0" * 64,
        name=model.name,
        base=Base("/base", None),
        donor=DonorDir("/donor") if scheme in WITH_DONOR else None,
        **exact_sets(model),
        shared_experts=scheme,
        head="keep",
        layout="full",
        out=f"/tree/{model.name}",
        extra={},
    )
