"""``add --dry``: what a repository holds, and which models of the catalog it fits."""

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

from spark_deploy.cli.hosts import Target
from spark_deploy.config.catalog.companions import HUB_REPOSITORY
from spark_deploy.config.catalog.model import HybridModel
from spark_deploy.config.documents.shown import shown
from spark_deploy.config.errors import CatalogError
from spark_deploy.lock.verify_names import workplace
from spark_deploy.plan.checkpoint import exact_sets


def inspect(place: str, host: Target, *, as_json: bool) -> int:
    """Print the tensors of a repository or directory by its headers; read no weights."""
    place = _place(place)
    with workplace(host.settings.settings.hub) as builder:
        words = [JSON] if as_json else []
        for model in host.catalog.models.values():
            for order in _orders(model) if isinstance(model, HybridModel) else ():
                name = f"{model.name}.{order.shared_experts}.json"
                (builder.folder / name).write_text(text_of(order), encoding="utf-8")
                words += [AGAINST, name]
        print(shown(builder.ask(INSPECT, *words, place)), end="")
    return 0


def _place(named: str) -> str:
    """Return the directory or repository.

    Raises:
        CatalogError: it is neither.
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
