"""Hostile input for property-based tests: anything is accepted or refused with clear problems."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from spark_deploy.config.errors import SparkError
from tests.unit.examples import examples

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


def _nested(scalars: st.SearchStrategy, keys: st.SearchStrategy) -> st.SearchStrategy:
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=8,
    )


JSON = _nested(_SCALARS | st.integers(-(2**70), 2**70), st.text(max_size=8))
YAML = _nested(
    _SCALARS | st.dates() | st.binary(max_size=4)
    | st.sampled_from(["v2", "/x", "0", "off", "generate"]),
    st.text(max_size=6) | st.integers() | st.none(),
)  # fmt: skip
BOMBS = (
    *(b"", b"null", b"[]", b"{}", b"1e999", b"9" * 5000, b"\xff\xfe"),
    *(b"[" * 100_000, b'{"a":' * 100_000),
)


def tries(number: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples(number), deadline=None, suppress_health_check=checks)


@st.composite
def changed_in_one_place(draw: st.DrawFn, data: bytes) -> bytes:
    """Return a JSON document with one value, at any depth, replaced or removed."""
    document = json.loads(data)
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
            break
        place = place[key]
    if draw(st.booleans()):
        place[key] = draw(JSON)
    else:
        del place[key]
    return json.dumps(document).encode()


def hostile(data: bytes) -> st.SearchStrategy[bytes]:
    return changed_in_one_place(data) | st.sampled_from(BOMBS)


@contextmanager
def accepted_or_refused(*, in_one_line: bool = False) -> Iterator[None]:
    """Accept success and complete problems; any other error fails the test."""
    try:
        yield
    except SparkError as error:
        check_problems(error, in_one_line=in_one_line)


def check_problems(error: SparkError, *, in_one_line: bool = False) -> None:
    assert error.problems
    for problem in error.problems:
        assert problem.where
        assert problem.what
        assert problem.fix
        str(problem).encode()
        if in_one_line:
            assert "\n" not in f"{problem.where}{problem.what}{problem.fix}"
