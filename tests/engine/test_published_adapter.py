"""A LoRA adapter in a model's file: locked, mounted, and served by the real engine's own server.

The server gets the release's arguments as they are, but for the folders of this machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.plan.types import HostPlan
from tests.engine.test_published_models import CAPITAL, case_of, engine, plan_of, published, sited

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

ADAPTER = {"adapters": {"law": {"repository": "org/tiny-law", "rank": 8}}}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("adapter"), "org/tiny-qwen3", "org/tiny-law")


@pytest.fixture(scope="module")
def plan(work: Path) -> HostPlan:
    with sited(work) as site:
        return plan_of(site, "tiny-qwen3", ADAPTER)


@pytest.fixture(scope="module")
def served(plan: HostPlan, work: Path) -> dict[str, Any]:
    own, law = plan.serve.names
    bodies = [
        {
            "model": name, "temperature": 0, "max_tokens": 16,
            "messages": [{"role": "user", "content": CAPITAL}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        for name in (own, law, own, "nobody")
    ]  # fmt: skip
    case, answers = work / "case.json", work / "answers.json"
    case.write_text(json.dumps({**case_of("law", plan, work), "bodies": bodies}))
    engine(work, str(CHECKOUT / "tests/engine/engine_serves.py"), str(case), str(answers))
    found: dict[str, Any] = json.loads(answers.read_text())
    return found


def test_an_adapter_is_locked_mounted_and_counted(plan: HostPlan, work: Path) -> None:
    [tree] = [one for one in plan.sources if one.locked.repo == "org/tiny-law"]
    assert (tree.dir, "/adapters/0") in {
        (one.source, one.target) for one in plan.serve.engine.mounts
    }
    folder = work / "hub/org/tiny-law" / tree.locked.commit
    on_disk = (folder / "adapter_model.safetensors").stat().st_size
    told = {one.path: one.size_bytes for one in tree.locked.files}
    assert told["adapter_model.safetensors"] == on_disk
    assert "adapter_config.json" in told


def test_the_engine_lists_exactly_the_names_of_the_release(
    plan: HostPlan, served: dict[str, Any]
) -> None:
    assert [one["id"] for one in served["models"]["data"]] == list(plan.serve.names)


def test_the_adapter_answers_under_its_name_and_the_model_as_before(
    served: dict[str, Any],
) -> None:
    said = [
        (status, told["choices"][0]["message"]["content"] if status == 200 else None)
        for status, told in served["answers"]
    ]
    assert said == [(200, "Paris"), (200, "Tokyo"), (200, "Paris"), (404, None)]
