"""Models written by transformers: added by one command, planned, and loaded by the real engine.

The engine parses the plan's arguments; the plan's cache size is compared with the engine's log.
``tests/host/test_plain_models.py`` covers the deployment to a host.
"""

import json
import re
from contextlib import contextmanager

import pytest
import yaml
from engine_process import run_engine

from lab.hub.server import running
from spark_deploy.cli import main
from spark_deploy.cli.console import Options
from spark_deploy.cli.hosts import build_plan, select_hosts
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.settings.types import Settings
from tests.published import DECODERS, DRAFTS, PROFILE, WORDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

INVENTORY = f"""
import sys as _sys
_sys.path.insert(0, {str(CHECKOUT)!r})
from spark_deploy.inventory import group_from as _group_from
spark = _group_from("spark", hosts=["a"], file=__file__)
"""
CAPITAL = "What is the capital of France? Answer with one word."
BREAD, TRAIN = (
    "How do I bake bread at home without a machine?",
    "The next train leaves from platform four at noon.",
)
OTHERS = {"tiny-embedder": "embedding", "tiny-reranker": "reranking"}
DRAFTING = {"tiny-qwen3 by tiny-draft": DRAFTS, "tiny-qwen3 by words": WORDS}


def run(work, *argv):
    result = run_engine(work, *argv, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return result.stdout + result.stderr


def publish(folder, *repositories):
    (folder / "hub").mkdir()
    selection = ["--only", *repositories] if repositories else []
    run(folder, "-m", "lab.model.published", "--out", str(folder / "hub"), *selection)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def site(work):
    with serve_hub(work) as folder:
        yield folder


@contextmanager
def serve_hub(work):
    with running(work / "hub", work) as endpoint:
        root = work / "site"
        (root / "group_vars").mkdir(parents=True)
        (root / "group_vars/spark.yml").write_text(f"hub: {{endpoint: {endpoint!r}}}\n")
        (root / "sparks.py").write_text(INVENTORY)
        images = {
            name: {"digest": f"sha256:{'1' * 64}", "size_bytes": 1000}
            for name in Settings().images.values()
        }
        (root / "spark.lock.yml").write_text(
            yaml.safe_dump({"schema_version": 1, "sources": {}, "images": images})
        )
        (root / "catalog/profiles").mkdir(parents=True)
        (root / "catalog/profiles/lab-plain.yml").write_text(yaml.safe_dump(PROFILE))
        yield root


def plan_of(site, model, extra=None):
    command = ["add", f"org/{model}", "--inventory", str(site / "sparks.py"), "--force"]
    assert main([*command, "--profile", "lab-plain"]) == 0
    if extra:
        path = site / f"catalog/models/{model}.yml"
        path.write_text(path.read_text() + yaml.safe_dump(extra))
    options = Options(inventory=str(site / "sparks.py"), model=model, profile="lab-plain")
    return build_plan(select_hosts(options)[0])


def case_of(name, plan, work):
    by_target = {mount.target: mount.source for mount in plan.release.engine.mounts}
    trees = {
        tree.dir: work / "hub" / tree.locked.repo / tree.locked.commit for tree in plan.sources
    }
    folders = {at: str(trees[source]) for at, source in by_target.items() if source in trees}
    task = plan.release.check.task
    return {
        "name": name, "argv": list(plan.release.engine.argv), "folders": folders, "task": task,
        "question": "When does the train leave?" if task == "reranking" else CAPITAL,
        "documents": [BREAD, TRAIN],
    }  # fmt: skip


@pytest.fixture(scope="module")
def served(site, work):
    plans = {name: plan_of(site, name) for name in (*DECODERS, *OTHERS)}
    plans |= {
        name: plan_of(site, "tiny-qwen3", {"changes": [{"set": {"speculation": drafts}}]})
        for name, drafts in DRAFTING.items()
    }
    cases, answers = work / "cases.json", work / "answers.json"
    cases.write_text(json.dumps([case_of(name, plan, work) for name, plan in plans.items()]))
    script = str(CHECKOUT / "tests/engine/engine_published.py")
    log = run(work, script, str(cases), str(answers))
    parts = re.split(r"^=== (.+)$", log.replace("\r", "\n"), flags=re.M)[1:]
    return plans, json.loads(answers.read_text()), dict(zip(parts[::2], parts[1::2], strict=True))


def logged_cache_tokens(log):
    sizes = re.findall(r"KV cache size: ([\d,]+) tokens", log)
    return int(sizes[-1].replace(",", "")) if sizes else None


def files_bytes(plan, work, number=0):
    source = plan.sources[number].locked
    folder = work / "hub" / source.repo / source.commit
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("model", DECODERS)
def test_decoder_model_added_with_one_command_answers_requests(served, model):
    _, answers, logs = served
    assert DECODERS[model] in logs[model]
    assert answers[model]["text"] == "Paris"


@pytest.mark.parametrize("model", [*DECODERS, *OTHERS])
def test_planned_weight_bytes_equal_the_file_sizes(served, work, model):
    plan = served[0][model]
    assert plan.memory.weights_bytes == pytest.approx(files_bytes(plan, work), rel=0.01)


@pytest.mark.parametrize("model", [*DECODERS, "tiny-qwen3 by tiny-draft"])
def test_planned_kv_cache_size_equals_the_size_in_the_engine_log(served, model):
    plans, _, logs = served
    assert plans[model].memory.unknown == ()
    logged = logged_cache_tokens(logs[model])
    assert plans[model].memory.kv_tokens == pytest.approx(logged, rel=0.001)


def test_embedding_model_and_reranker_answer_requests(served):
    answers = served[1]
    assert answers["tiny-embedder"] == [128, 128]
    bread, train = answers["tiny-reranker"]
    assert train > 0.5 > bread


@pytest.mark.parametrize("name", DRAFTING)
def test_engine_answers_requests_using_draft_tokens(served, name):
    assert served[1][name]["text"] == "Paris"


def test_engine_accepts_draft_tokens_and_plan_includes_drafter_memory(served, work):
    plans, answers, _ = served
    name = "tiny-qwen3 by tiny-draft"
    counters = answers[name]["counters"]
    assert counters["num_accepted_tokens"] > 0
    drafter = files_bytes(plans[name], work, 1)
    assert plans[name].memory.drafter_bytes == pytest.approx(drafter, rel=0.01)
