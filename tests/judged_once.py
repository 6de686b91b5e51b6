"""Caches files of catalog and settings, and their validation, for tests that read them often."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.config.catalog import load as catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings import load as settings


@pytest.fixture(scope="session", autouse=True)
def judged_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember(patch)
        yield


def remember(patch: pytest.MonkeyPatch) -> None:
    check, read, mapping = catalog.schema_problems, catalog.load_schema, catalog.read_mapping
    mappings: dict[tuple[bytes, str], bytes] = {}
    schemas: dict[str, Any] = {}
    valid: set[tuple[int, str]] = set()

    def schema_of(name: str, *, checkout: Path = CHECKOUT) -> Any:
        text = (checkout / "schema" / f"{name}.schema.json").read_text("utf-8")
        return schemas.get(text) or schemas.setdefault(text, read(name, checkout=checkout))

    def schema_problems(data: Any, schema: Any, where: Any) -> list[Any]:
        key = (id(schema), repr(data))
        problems = [] if key in valid else list(check(data, schema, where))
        if not problems:
            valid.add(key)
        return problems

    def mapping_of(path: Path, *, label: str) -> Any:
        try:
            key = (path.read_bytes(), label)
        except OSError:
            return mapping(path, label=label)
        if key not in mappings:
            mappings[key] = pickle.dumps(mapping(path, label=label))
        return pickle.loads(mappings[key])

    for module in (catalog, settings):
        patch.setattr(module, "read_mapping", mapping_of)
        patch.setattr(module, "load_schema", schema_of)
        patch.setattr(module, "schema_problems", schema_problems)
