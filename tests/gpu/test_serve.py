from pathlib import Path

import pytest

pytest.importorskip("vllm")

from proofs.serve import case as serve_case

PLANS = Path(__file__).resolve().parents[2] / "build" / "plans"
TREES = {
    "v2": "tiny-overlay-head8",
    "v2-tq": "tiny-overlay-head8",
    "agent": "tiny-overlay-head8",
    "v2-native": "tiny-native",
    "online-fp8": "tiny-base-head8",
    "base": "tiny-base",
    "base-mtp1": "tiny-base",
    "hybrid": "tiny-overlay",
    "hybrid-mtp1": "tiny-overlay",
    "hybrid-mtp2": "tiny-overlay",
    "v3": "tiny-v3",
}
pytestmark = pytest.mark.skipif(not PLANS.is_dir(), reason="needs plans: `make gpu-plans`")


def _failed(trees, out, profile, tree, kind=""):
    name = f"serve-{profile}{'-' + kind if kind else ''}.json"
    plan = PLANS / f"{profile}.json"
    return [r for r in serve_case.prove(trees / tree, out / name, plan, kind) if not r["passed"]]


@pytest.mark.parametrize("profile", sorted(TREES))
def test_profile_serves_over_http(profile, trees, results):
    assert _failed(trees, results, profile, TREES[profile]) == []


def test_model_answers_image_questions_over_http(trees, results):
    assert _failed(trees, results, "v2", "tiny-overlay-head8", "pictures") == []


def test_watchdog_metrics_keep_changing_while_a_long_prompt_is_processed(trees, results):
    assert _failed(trees, results, "v2", "long", "long") == []
