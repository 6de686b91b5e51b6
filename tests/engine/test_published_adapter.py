"""A LoRA adapter in a model's file: locked, mounted, and served by the real engine's server.

Only the folders of the release's arguments are replaced by those of this machine.
"""

import json
from typing import Any

import pytest

from spark_deploy.config.checkout import CHECKOUT
from tests.engine.test_published_models import CAPITAL, case_of, plan_of, publish, run, serve_hub

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

ADAPTER = {"adapters": {"law": {"repository": "org/tiny-law", "rank": 8}}}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("adapter"), "org/tiny-qwen3", "org/tiny-law")


@pytest.fixture(scope="module")
def plan(work):
    with serve_hub(work) as site:
        return plan_of(site, "tiny-qwen3", ADAPTER)


@pytest.fixture(scope="module")
def served(plan, work):
    own, law = plan.release.names
    bodies = [
        {
            "model": name, "temperature": 0, "max_tokens": 16,
            "messages": [{"role": "user", "content": CAPITAL}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        for name in (own, law, own, "unknown")
    ]  # fmt: skip
    case, answers = work / "case.json", work / "answers.json"
    case.write_text(json.dumps({**case_of("law", plan, work), "bodies": bodies}))
    run(work, str(CHECKOUT / "tests/engine/engine_serves.py"), str(case), str(answers))
    replies: dict[str, Any] = json.loads(answers.read_text())
    return replies


def test_lora_adapter_is_locked_and_mounted(plan, work):
    [tree] = [source for source in plan.sources if source.locked.repo == "org/tiny-law"]
    assert (tree.dir, "/adapters/0") in {
        (mount.source, mount.target) for mount in plan.release.engine.mounts
    }
    folder = work / "hub/org/tiny-law" / tree.locked.commit
    on_disk = (folder / "adapter_model.safetensors").stat().st_size
    sizes = {file.path: file.size_bytes for file in tree.locked.files}
    assert sizes["adapter_model.safetensors"] == on_disk
    assert "adapter_config.json" in sizes


def test_engine_lists_the_model_and_adapter_names_of_the_release(plan, served):
    assert [model["id"] for model in served["models"]["data"]] == list(plan.release.names)


def test_lora_adapter_and_base_model_answer_requests(served):
    replies = [
        (status, body["choices"][0]["message"]["content"] if status == 200 else None)
        for status, body in served["answers"]
    ]
    assert replies == [(200, "Paris"), (200, "Tokyo"), (200, "Paris"), (404, None)]
