"""Caches the catalog's files and their validation for tests that read them often."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.config.catalog import load
from spark_deploy.config.checkout import CHECKOUT


@pytest.fixture(scope="session", autouse=True)
def judged_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember(patch)
        yield


def remember(patch: pytest.MonkeyPatch) -> None:
    check, read, mapping = load.problems_of, load.load_schema, load.read_mapping
    mappings: dict[tuple[bytes, str], Any] = {}
    schemas: dict[str, Any] = {}
    known: dict[tuple[int, str, str], list[Any]] = {}

    def schema_of(name: str, *, checkout: Path = CHECKOUT) -> Any:
        text = (checkout / "schema" / f"{name}.schema.json").read_text("utf-8")
        return schemas.get(text) or schemas.setdefault(text, read(name, checkout=checkout))

    def problems_of(data: Any, schema: Any, where: Any, *more: Any) -> list[Any]:
        key = (id(schema), repr(data), where(()))
        if key not in known:
            known[key] = list(check(data, schema, where, *more))
        return known[key]

    def mapping_of(path: Path, *, shown: str) -> Any:
        try:
            key = (path.read_bytes(), shown)
        except OSError:
            return mapping(path, shown=shown)
        if key not in mappings:
            mappings[key] = mapping(path, shown=shown)
        return copy.deepcopy(mappings[key])

    patch.setattr(load, "read_mapping", mapping_of)
    patch.setattr(load, "load_schema", schema_of)
    patch.setattr(load, "problems_of", problems_of)
