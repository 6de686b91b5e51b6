"""Files in the user's catalog: drafts with comments, written all together or not at all."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from spark_contract import files

from spark_deploy.cli.console import note
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import catalog_files
from spark_deploy.config.errors import CatalogError

_WIDTH = 96
SCHEMAS = ("hosts", "settings", "model", "plain_model", "profile")


def schema_line(root: Path, file: Path, schema: str) -> str:
    """Return the schema comment for YAML language servers, or "" if the schema is missing."""
    path = f"schema/{schema}.schema.json"
    if not (root / path).is_file():
        return ""
    up = "../" * len(file.relative_to(root).parent.parts)
    return f"# yaml-language-server: $schema={up}{path}\n"


@dataclass(slots=True)
class Draft:
    """A new file for ``catalog/models``, with a comment above each key."""

    repository: str
    revision: str = "main"
    about: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    open_questions: list[str] = field(default_factory=list)  # unknown or unused, for the user

    @property
    def name(self) -> str:
        stem = self.repository.rpartition("/")[2].lower()
        return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("._-") or "model"

    def put(self, key: str, value: Any, comment: str = "") -> None:
        if value:
            self.keys[key], self.comments[key] = value, comment

    def text(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for line in self.about:
            yield from _comment(line)
        keys = {
            "kind": "plain",
            "summary": self.keys.get("summary", f"{self.repository}, as published")[:100],
            "choose_when": "describe when to choose this model",
            "repository": self.repository,
            "revision": self.revision,
            **{key: value for key, value in self.keys.items() if key != "summary"},
        }
        for key, value in keys.items():
            if self.comments.get(key):
                yield ""
                yield from _comment(self.comments[key])
            text = yaml.safe_dump({key: value}, sort_keys=False, width=_WIDTH, allow_unicode=True)
            yield text.rstrip("\n")


def _comment(text: str) -> list[str]:
    plain = " ".join("".join(sign if sign.isprintable() else "?" for sign in text).split())
    return textwrap.wrap(plain, _WIDTH, initial_indent="# ", subsequent_indent="# ") or ["#"]


def write_files(root: Path, texts: Mapping[tuple[str, str], str], *, force: bool) -> list[Path]:
    """Write all or none of the catalog files, given by kind and name; return their paths."""
    paths = {(kind, name): root / "catalog" / kind / f"{name}.yml" for kind, name in texts}
    if not force:
        _reject_existing(paths)
    before = {path: path.read_bytes() if path.exists() else None for path in paths.values()}
    try:
        for (kind, name), path in paths.items():
            text = texts[kind, name]
            is_plain = re.search(r"^kind: plain\b", text, re.MULTILINE)
            schema = "profile" if kind == "profiles" else "plain_model" if is_plain else "model"
            files.write_text(path, schema_line(root, path, schema) + text)
        _check(root, list(texts))
    except BaseException:  # includes a full disk and Ctrl-C
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != content:
                files.write_chunks(path, [content])
        raise
    for (kind, name), path in paths.items():
        shipped = catalog_files(kind).get(name)
        if shipped is not None and shipped != path:
            note(f"{name}: the new file replaces the shipped file in {kind}")
        note(f"{path}: written")
    return list(paths.values())


def _reject_existing(paths: Mapping[tuple[str, str], Path]) -> None:
    for (kind, name), path in paths.items():
        if path.exists():
            raise CatalogError.one(str(path), "already exists", "add --force, or remove the file")
        if name in catalog_files(kind):
            problem = "would replace the shipped file with the same name"
            fix = "choose another name, or add --force to replace the shipped file"
            raise CatalogError.one(str(path), problem, fix)


def _check(root: Path, written: list[tuple[str, str]]) -> None:
    """Raise CatalogError if a written model or profile is invalid."""
    catalog = read_catalog(user_dir=root)
    profiles = [name for kind, name in written if kind == "profiles"]
    for kind, model in written:
        if kind == "models":
            catalog.model(model)
            for profile in profiles:
                catalog.profile(profile, model)
