"""One way to name content: sha256 of canonical JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from spark_contract.documents import plain


def digest_of(value: Any) -> str:
    """Return 64 hex digits that change exactly when the content of ``value`` does."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
