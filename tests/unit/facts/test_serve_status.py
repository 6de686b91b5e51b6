"""A run is only "nothing to do" when the host provably serves the planned release."""

import copy
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.hosts.status import Status
from tests.unit.statuses import told

RELEASE = "main-0123456789ab"
HERE = Path(__file__).parent
RIGHT: dict[str, Any] = {
    "services": {
        "main": {
            "good": RELEASE, "active": RELEASE, "enabled": [RELEASE],
            "traffic_open": True,
            "gateway": {"active": "active"},
        }
    },
    "releases": [{"name": RELEASE}],
    "live": {"ok": True, "release": RELEASE, "seconds": 0.2},
}  # fmt: skip


def test_a_proven_running_release_needs_nothing() -> None:
    assert told(RIGHT).unproven("main", RELEASE) == ""


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("services", "main", "active"), "main-other", "serves main-other"),
        (("services", "main", "active"), None, "serves nothing"),
        (("services", "main", "good"), None, "check has not passed"),
        (("services", "main", "enabled"), [], "boots nothing"),
        (("services", "main", "enabled"), [RELEASE, "main-b"], "boots main-0123456789ab, main-b"),
        (("releases", 0, "unproven"), "never checked", "proof: never checked"),
        (("releases",), [], "proof: none"),
        (("services", "main", "traffic_open"), False, "gateway is closed"),
        (("services", "main", "gateway"), {"active": "failed"}, "gateway is not running"),
        (
            ("services", "main", "gateway"),
            {"active": "active", "difference": "listens on 0.0.0.0"},
            "the gateway: listens on 0.0.0.0",
        ),
        (
            ("live",),
            {"ok": False, "release": RELEASE, "detail": "timed out"},
            "no answer: timed out",
        ),
        (("live", "release"), "main-other", "no answer"),
        (("live",), None, "no answer"),
    ],
)
def test_each_missing_piece_is_named(path: tuple[Any, ...], value: Any, said: str) -> None:
    document = copy.deepcopy(RIGHT)
    node: Any = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value

    assert said in told(document).unproven("main", RELEASE)


def test_a_host_without_our_tools_is_unproven_and_no_error() -> None:
    assert "tools" in Status().process([]).unproven("main", RELEASE)


def test_tools_of_another_version_are_no_error_and_prove_nothing() -> None:
    found = Status().process(['{"schema_version": 2, "colour": "red"}'])
    assert found.installed
    assert "another version (colour: unknown)" in found.unproven("main", RELEASE)
