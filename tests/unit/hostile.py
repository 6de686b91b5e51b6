"""Documents that a hub should not send: another value anywhere, something missing, bombs."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
BOMBS = (
    *(b"", b"null", b"[]", b"{}", b"1e999", b"9" * 5000, b"\xff\xfe"),
    *(b"[" * 100_000, b'{"a":' * 100_000),
)


@st.composite
def changed_in_one_place(draw: st.DrawFn, data: bytes) -> bytes:
    """Return a document with one of its values, at any depth, replaced by anything or gone."""
    document = json.loads(data)
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
            break
        place = place[key]
    if draw(st.booleans()):
        place[key] = draw(ANYTHING)
    else:
        del place[key]
    return json.dumps(document).encode()


def hostile(data: bytes) -> st.SearchStrategy[bytes]:
    """Return what may come in the place of a document."""
    return changed_in_one_place(data) | st.sampled_from(BOMBS)
