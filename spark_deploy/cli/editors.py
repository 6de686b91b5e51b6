"""What editors with the YAML language server read: the schemas beside an owner's files."""

from __future__ import annotations

from pathlib import Path

# Of everything that owners write.
SCHEMAS = ("hosts", "settings", "model", "plain_model", "profile")


def schema_line(root: Path, file: Path, schema: str) -> str:
    """Return the first line of a file that names its schema; nothing where none lies there."""
    path = f"schema/{schema}.schema.json"
    if not (root / path).is_file():
        return ""
    up = "../" * len(file.relative_to(root).parent.parts)
    return f"# yaml-language-server: $schema={up}{path}\n"
