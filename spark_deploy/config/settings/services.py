"""Settings of services beside the main one: each has model, profile, port and memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from spark_contract.release import EMBEDDINGS, ROUTED

from spark_deploy.config.documents.declare import Gib, about, form, in_gib, needed, section, setting
from spark_deploy.config.settings.engine.engine import ServiceEngineSettings
from spark_deploy.config.settings.rules import Broken
from spark_deploy.config.settings.service import CATALOG_NAME, SERVED_NAME

SERVICE_NAME = form(
    "^[a-z][a-z0-9-]{0,30}$", "a name of at most 31 small letters, digits and dashes", "search"
)
# What the engine is told is a share in hundredths of the whole memory.
_SHARES = 100


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """One more service of a host: release, proof, watch, gateway and way back of its own."""

    model: str = needed("The stem of a file in catalog/models.", **CATALOG_NAME)
    profile: str = needed("The stem of a file in catalog/profiles.", **CATALOG_NAME)
    port: int = needed("Port of its gateway.", minimum=1, maximum=65535)
    memory_bytes: Gib = needed(
        "What its engine may take in all; the main one gets that much less. Rounded down to a "
        "hundredth of memory.total_gib.",
        key="memory_gib",
        exclusiveMinimum=0,
    )
    names: tuple[Annotated[str, about(**SERVED_NAME)], ...] = setting(
        (), "As serve.names.", uniqueItems=True
    )
    paths: tuple[Literal[ROUTED], ...] = setting(  # type: ignore[valid-type]
        (),
        "Paths of the main service's gateway that this one answers when a request names no model; "
        "one that does goes to the service of that name.",
        uniqueItems=True,
        examples=[[EMBEDDINGS]],
    )
    engine: ServiceEngineSettings = section(ServiceEngineSettings)

    def broken(self, total_bytes: int) -> Iterator[Broken]:
        """Yield what does not add up; keys are seen from the service."""
        if self.memory_bytes * _SHARES < total_bytes:
            least = in_gib(-(-total_bytes // _SHARES))
            what = f"{in_gib(self.memory_bytes)} GiB are less than a hundredth of the memory"
            yield Broken(("memory_gib",), what, f"give it {least} GiB or more")
        yield from (one._replace(key=("engine", *one.key)) for one in self.engine.broken())
