"""Our own programs on a host: what they import is there before they are."""

from __future__ import annotations

from typing import Any

import pytest

from roles import tools
from spark_deploy.plan.types import ToolsPlan

PLAN = ToolsPlan(digest="1" * 64, python_requirements="requirements.txt")


def test_no_job_can_start_with_tools_whose_python_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run may end between the two steps, and a boot goes on with jobs by itself."""
    done: list[str] = []
    for step in ("install_tools", "install_site"):
        monkeypatch.setattr(tools, step, lambda step=step, **_: done.append(step))
    role: Any = tools.apply
    for declare in ("expect_files", "expect_fact"):
        monkeypatch.setattr(tools, declare, lambda *_: None)
    role._inner(plan=PLAN, files=(), units=())
    assert done == ["install_site", "install_tools"]
