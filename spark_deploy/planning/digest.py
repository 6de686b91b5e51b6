"""One way to name content: sha256 of canonical JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any


def plain(value: Any) -> Any:
    """Turn dataclasses and tuples into plain JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def digest_of(value: Any) -> str:
    """Return 64 hex digits that change exactly when the content of ``value`` does."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
