"""A host is planned once in a process, also when a deploy follows its forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_deploy.inventory import host_names
from spark_deploy.inventory.host_names import Known
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.resolve import Request
from tests.unit.planning.plans import CATALOG, PAYLOAD, made_up_lock, settings_of


def test_the_same_request_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Request] = []
    monkeypatch.setattr(
        host_names, "plan_host", lambda request: planned.append(request) or plan_host(request)
    )
    settings = settings_of()
    request = Request("spark-1", settings, CATALOG, made_up_lock(settings, CATALOG), PAYLOAD)
    known = Known(None, CATALOG)
    assert known.plan(request) is known.plan(replace(request))
    other = replace(request, host="spark-2")
    assert known.plan(other).host == "spark-2"
    assert planned == [request, other]
