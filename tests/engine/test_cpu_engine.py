import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import run_engine
from plain_weights import write_plain

from proofs.trees.build import (
    VARIANTS,
    build,
    damaged,
    drop_names,
    names_of,
    plan,
    rewrite,
    stored_bytes,
)
from spark_deploy.config.checkout import CHECKOUT
from tests.unit.planning.plans import shipped_catalog

HERE = Path(__file__).parent

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


class Engine:
    def __init__(self, plugin, work):
        self._plugin, self._work = plugin, work

    def run(self, *argv, check=True):
        environment = {"PYTHONPATH": str(self._plugin), "VLLM_PLUGINS": "spark"}
        return run_engine(self._work, *argv, check=check, **environment)

    def answers(self, checkpoint, **options):
        target = checkpoint.with_suffix(".answers.json")
        arguments = [str(checkpoint), str(target), json.dumps(options)]
        result = self.run(str(HERE / "engine_run.py"), *arguments)
        return json.loads(target.read_text()), result.stdout + result.stderr

    def refusal(self, script, checkpoint, **options):
        arguments = [str(checkpoint), json.dumps(options)]
        if script == "engine_run.py":
            arguments.insert(1, "/dev/null")
        result = self.run(str(HERE / script), *arguments, check=False)
        assert result.returncode != 0
        return result.stdout + result.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def engine(work):
    target, context = work / "plugin", work / "context"
    shutil.copytree(CHECKOUT / "files/image", context)
    engine = Engine(target, work)
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    engine.run("-m", "pip", "install", *offline, "--target", str(target), str(context))
    return engine


@pytest.fixture(scope="module")
def sources(work):
    hub = work / "hub"
    argv = [sys.executable, "-m", "lab.model", "build", "--out", str(hub), "--untrained"]
    subprocess.run(argv, check=True, cwd=CHECKOUT)
    trees = [hub / "lab" / name for name in ("tiny-int4", "tiny-fp8")]
    return [tree / (tree / "refs/main").read_text().strip() for tree in trees]


@pytest.fixture(scope="module")
def trees(sources, work):
    for name in ("overlay", "full", "overlay-head8", "full-head8"):
        build(plan(*sources, work / name, VARIANTS[name]), work)
    return work


@pytest.fixture(scope="module")
def overlay(trees):
    return trees / "overlay-head8"


@pytest.fixture(scope="module")
def plain(sources, work, overlay):
    return write_plain(*sources, work / "plain", overlay)


@pytest.fixture(scope="module")
def reference(engine, plain):
    return engine.answers(plain)[0]


def test_installed_engine_passes_the_plugin_check(engine):
    result = engine.run("-m", "spark_vllm.check")
    assert re.search(r"vLLM 0\.32\.0 is compatible \(\d\d+ checks\)", result.stdout)


def test_plugin_dequantization_is_bit_exact(engine, sources, trees, overlay, plain):
    kept = write_plain(*sources, trees / "plain-keep", trees / "overlay")
    pairs = [str(path) for path in (overlay, plain, trees / "full", kept)]
    result = engine.run(str(HERE / "engine_tensors.py"), *pairs)
    counts = json.loads(result.stdout.splitlines()[-1])
    assert counts[0] == counts[1] > 200


def test_portable_overlay_generates_the_same_tokens_as_the_plain_checkpoint(
    engine, overlay, reference
):
    answers, log = engine.answers(overlay, load_format="spark_portable")
    assert answers == reference
    assert "spark_inc: 12 FP8 block names in 8 modules, block_shape=[128, 128]" in log
    assert re.search(r"spark portable mode: dequantized 128 tensors to bfloat16", log)
    assert re.search(r"spark: all numbers of \d{2,} tensors and the logits of 1 heads of", log)


def test_full_layout_with_drafts_generates_the_same_tokens_as_plain_checkpoint(
    engine, trees, reference
):
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    answers, log = engine.answers(
        trees / "full-head8", load_format="spark_portable", speculative_config=speculation
    )
    assert [tokens[0] for tokens in answers["tokens"]] == [
        tokens[0] for tokens in reference["tokens"]
    ]
    assert answers["drafts"] > 0
    assert re.search(r"spark portable mode: .* for SparkQwen35MoeMTP", log)


def test_engine_accepts_draft_tokens_from_an_int4_drafter_when_sampling(
    engine, sources, work, reference
):
    v3 = shipped_catalog().profile("v3", "lab-tiny")
    order = plan(*sources, work / "int4-drafter", {**VARIANTS["v3"], "head": "int8-g128"})
    build(order, work)
    options = {
        "method": "mtp",
        "num_speculative_tokens": v3.speculation.tokens,
        "draft_sample_method": v3.speculation.draft_sample_method,
        "rejection_sample_method": v3.speculation.rejection_sample_method,
        "num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 4, 1]],
    }
    answers, log = engine.answers(
        work / "int4-drafter", load_format="spark_portable", speculative_config=options
    )
    assert [t[0] for t in answers["tokens"]] == [t[0] for t in reference["tokens"]]
    assert answers["drafts"] > 0
    packed = len(order["drafter_int4"])
    assert packed == 8 * 3 + 4
    assert re.search(rf"dequantized \d+ tensors .*int4 {packed}\b.* for SparkQwen35MoeMTP", log)


def test_engine_rejects_a_checkpoint_with_a_missing_scale_before_loading(engine, trees):
    tree = damaged(trees / "overlay", "no-scale")
    name = next(name for name in names_of(tree) if name.endswith("weight_scale_inv_fp8"))
    drop_names(tree, {name})
    assert f"lacks {name}" in engine.refusal("engine_config.py", tree)


def test_engine_rejects_a_nan_scale_and_names_the_tensor(engine, trees):
    tree = damaged(trees / "overlay", "not-a-number")
    name = "model.language_model.layers.1.mlp.shared_expert.down_proj.weight_scale_inv_fp8"
    rewrite(tree, name, b"\xc0\x7f" + stored_bytes(tree, name)[2:])
    log = engine.refusal("engine_run.py", tree, load_format="spark_portable")
    assert "are not positive" in log
    assert "layers.1.mlp.shared_expert.down_proj.weight" in log


def test_engine_rejects_non_finite_and_implausible_values_in_every_dtype(engine):
    result = engine.run(str(HERE / "engine_finite.py"))
    report = json.loads(result.stdout.splitlines()[-1])
    for dtype, finite in report["verdicts"].items():
        assert finite.pop("nan") is False, dtype
        assert finite.pop("inf", False) is False, dtype
        assert all(finite.values()), dtype
    assert report["others"] == [True, True, True]
    assert report["wrapped_once"]
    scales = report["scales"]
    for damage in ("512 times as large at one place", "512 times as large", "32 times as small"):
        assert "0.w13_scales" in scales.pop(damage), damage
    assert set(scales.values()) == {""}
    drafters = report["drafters"]
    assert drafters["head loaded later"] == ""
    assert "layer.weight" in drafters["damaged layer"]
    assert "lm_head.weight" in drafters["damaged own head"]
    assert report["modules_without_flags"] == []


def test_portable_load_format_rejects_a_plain_checkpoint(engine, plain):
    log = engine.refusal("engine_run.py", plain, load_format="spark_portable")
    assert "is not a hybrid checkpoint" in log


def test_engine_without_the_plugin_rejects_a_hybrid_checkpoint(overlay, work):
    log = Engine(work / "nothing", work).refusal("engine_config.py", overlay)
    assert "Unknown quantization method: spark_inc" in log


def test_engine_accepts_an_intact_checkpoint(engine, overlay):
    engine.run(str(HERE / "engine_config.py"), str(overlay), "{}")
