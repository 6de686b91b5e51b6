"""Record the kernels that vLLM chooses on capability 9.0 (H200) and 12.1 (GB10), without a GPU.

    python3 -m proofs.engine.backends PLANS OUT.json

The CUDA wheel builds each profile's target and drafter in real widths on torch's meta device under
a faked capability, as planned and without ``PINS``. PLANS is a folder with the output of
``spark-deploy plan --json``. Needs vLLM with FlashInfer, a C compiler and `nm`; no kernel runs.
"""

import ctypes
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from proofs.judges.answers import row
from proofs.kernel_notes import find_note
from proofs.result_files import describe_run, print_rows, write_result

PUBLISHED_BF16 = "published-bf16"
DEVICES: dict[str, dict[str, Any]] = {
    "9.0": {
        "name": "NVIDIA H200",
        "is_integrated": False,
        "multi_processor_count": 132,
        "shared_memory_per_block_optin": 232_448,
    },
    "12.1": {
        "name": "NVIDIA GB10",
        "is_integrated": True,
        "multi_processor_count": 48,
        "shared_memory_per_block_optin": 101_376,
    },
}
GIB = 1 << 30
OPTION_PINS = (
    "--gdn-prefill-backend",
    "--kernel-config",
    "--moe-backend",
    "--speculative-config moe_backend",
)
VARIABLE_PINS = ("VLLM_USE_DEEP_GEMM", "VLLM_USE_FLASHINFER_SAMPLER")
PINS = (*OPTION_PINS, *VARIABLE_PINS)


@dataclass(frozen=True)
class Case:
    name: str
    plan: dict[str, Any]
    tree: str
    shape: str


def read_pins(argv: list[str], environment: dict[str, str]) -> dict[str, str]:
    options = {word: argv[at + 1] for at, word in enumerate(argv[:-1]) if word.startswith("--")}
    drafts = json.loads(options.get("--speculative-config", "{}"))
    options["--speculative-config moe_backend"] = drafts.get("moe_backend")
    settings = {**options, **environment}
    return {name: settings[name] for name in PINS if settings.get(name)}


def remove_pins(argv: list[str]) -> list[str]:
    argv = list(argv)
    for option in OPTION_PINS:
        if option in argv:
            del argv[argv.index(option) : argv.index(option) + 2]
    if "--speculative-config" in argv:
        index = argv.index("--speculative-config") + 1
        drafts = json.loads(argv[index])
        drafts.pop("moe_backend", None)
        argv[index] = json.dumps(drafts)
    return argv


def read_cases(plans: Path) -> Iterator[Case]:
    from proofs.trees.build import VARIANTS

    for path in sorted(plans.glob("*.json")):
        [plan] = json.loads(path.read_text())
        name = f"{plan['profile']} of {plan['model']}"
        shape = plan["model"]
        if path.stem == PUBLISHED_BF16:
            yield Case("plain of a BF16 repository", plan, "wide-plain", "qwen3.5-122b")
            continue
        if plan["profile"] == "plain":
            yield Case("plain of an FP8 repository", plan, "wide-donor", shape)
            continue
        build = (plan["checkpoint"] or {}).get("build")
        variant = "base"
        if build:
            choices = {key: build[key] for key in ("layout", "head", "shared_experts")}
            if build.get("drafter_int4"):
                choices["drafter"] = "int4-g128"
            [variant] = [name for name, made in VARIANTS.items() if made == choices]
        kind = "int4mtp" if shape == "qwen3.5-35b" else "wide"
        yield Case(name, plan, f"{kind}-{variant}", shape)


def write_trees(out: Path) -> None:
    import shutil

    from lab.model import original, repository, vocabulary
    from proofs.trees.build import SEED, VARIANTS, WIDE, build, plan, write_wide
    from proofs.trees.special import pack_drafter

    work = out / "work"
    work.mkdir(parents=True)
    base, donor = write_wide(out)
    weights = original.random_weights(WIDE, SEED)
    repository.write_plain(out / "wide-plain", WIDE, weights, vocabulary.train(1024))
    int4 = out / "int4mtp-base"
    shutil.copytree(base, int4)
    pack_drafter(int4, weights)
    for name, variant in VARIANTS.items():
        build(plan(base, donor, out / f"wide-{name}", variant), work)
        build(plan(int4, donor, out / f"int4mtp-{name}", variant), work)


def real_sizes(model: str) -> dict[str, Any]:
    from lab.model.shape import text_config
    from proofs.trees.build import WIDE
    from proofs.trees.special import TRUE_35B, TRUE_122B

    shapes = {
        "qwen3.5-35b": replace(TRUE_35B, expert_width=512),
        "qwen3.5-122b": replace(TRUE_122B, expert_width=1024),
    }
    ids = {"<|endoftext|>": 0}
    small, true = text_config(WIDE, ids), text_config(shapes[model], ids)
    # The plugin compares the tensors of the checkpoint with these.
    counts = {"num_hidden_layers", "layer_types", "full_attention_interval", "num_experts"}
    return {key: true[key] for key in true if true[key] != small[key] and key not in counts}


def load_stub_driver(folder: Path) -> None:
    """Load a stub CUDA driver with failing calls, so that the engine's libraries load."""
    import sysconfig

    site = Path(sysconfig.get_paths()["purelib"]) / "vllm"
    libraries = [str(path) for path in (*site.glob("*.so"), *site.glob("vllm_flash_attn/*.so"))]
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True
    ).stdout
    names = sorted(set(re.findall(r"^ +U (cu[A-Z]\w*)", symbols, re.M)))
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text("\n".join(f"int {name}(void) {{ return 100; }}" for name in names))
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def fake_device(capability: str, folder: Path) -> None:
    from unittest.mock import MagicMock

    load_stub_driver(folder)
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = map(int, capability.split("."))
    device = SimpleNamespace(
        **DEVICES[capability], major=major, minor=minor, total_memory=128 * GIB, warp_size=32,
        L2_cache_size=24 << 20, regs_per_multiprocessor=65_536,
    )  # fmt: skip
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    torch.cuda.get_device_properties = lambda *_: device
    torch.cuda.get_device_name = lambda *_: device.name
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.mem_get_info = lambda *_: (100 * GIB, 128 * GIB)
    torch.cuda.Stream = torch.cuda.Event = MagicMock
    triton_driver = MagicMock()
    triton_driver.get_current_target.return_value = GPUTarget("cuda", 10 * major + minor, 32)
    triton_driver.utils.get_device_properties.return_value = {
        "max_shared_mem": device.shared_memory_per_block_optin,
        "multiprocessor_count": device.multi_processor_count,
    }
    driver.set_active(triton_driver)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    vllm.platforms._current_platform = NonNvmlCudaPlatform()
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # the fakes are in this process only


def meta_device() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    makes = _device_constructors()

    class Meta(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if function is torch.Tensor.cuda:
                return args[0]
            if function in makes or kwargs.get("device") is not None:
                kwargs["device"] = "meta"
            return function(*args, **kwargs)

    return Meta()


def record_choices(case: Case, trees: Path, *, pinned: bool) -> dict[str, str]:
    engine = case.plan["release"]["engine"]
    argv = engine["argv"] if pinned else remove_pins(engine["argv"])
    kept = {name: value for name, value in engine["env"].items() if name.startswith("VLLM_")}
    for name in VARIABLE_PINS:
        os.environ.pop(name, None)
        if not pinned:
            kept.pop(name, None)
    os.environ.update(kept)
    config = build_config(argv, trees / case.tree, real_sizes(case.shape))
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    drafts = config.speculative_config
    configs = {"target": (config, config.model_config)}
    if drafts is not None:
        configs["drafter"] = (drafts.apply_draft_overrides(config), drafts.draft_model_config)
    choices = {
        "sampler": "FlashInfer" if flashinfer_sampler_supported() else "Triton",
        "FlashInfer autotune": str(config.kernel_config.enable_flashinfer_autotune is not False),
        "JIT warm-up": str(config.kernel_config.enable_jit_warmup),
        "CUDA graphs": str(config.compilation_config.cudagraph_mode),
    }
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store.name}.store", 0, backend="gloo")
        initialize_model_parallel(1, 1)
    for name, (own, model_config) in configs.items():
        with (
            set_current_vllm_config(own),
            set_default_torch_dtype(config.model_config.dtype),
            meta_device(),
        ):
            model = initialize_model(own, model_config=model_config)
        for module_name, module in model.named_modules():
            for kind, choice in read_choices(module_name, module):
                known = choices.setdefault(f"{name} {kind}", choice)
                if known != choice:
                    raise ValueError(f"{case.name}: {name} {kind} is {known} and {choice}")
    return choices


def build_config(argv: list[str], tree: Path, sizes: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if os.environ.get("VLLM_PLUGINS"):
        from spark_vllm.register import register

        register()
    # A vision tower cannot be built on the meta device.
    argv = [*argv[1:], "--language-model-only"]
    argv += ["--hf-overrides", json.dumps({"text_config": sizes})]
    argv[argv.index("--max-model-len") + 1] = "4096"
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    arguments.model = str(tree)
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def read_choices(name: str, module: Any) -> Iterator[tuple[str, str]]:
    from proofs.engine.case import method_chain

    kind = type(module).__name__
    if "visual" in name:
        return
    if kind == "Attention":
        version = getattr(module.impl, "vllm_flash_attn_version", None)
        yield "attention", module.attn_backend.get_name() + (f" {version}" if version else "")
        return
    if kind == "QwenGatedDeltaNetAttention":
        yield "GDN prefill", module.gdn_prefill_backend
        yield "GDN decode", module.gdn_decode_kernel
    method = getattr(module, "quant_method", None)
    if method is None or kind == "VocabParallelEmbedding":
        return
    if kind == "RoutedExperts":
        backends = [
            backend.value for key, backend in vars(method).items() if key.endswith("_backend")
        ]
        yield "experts", " ".join([type(method).__name__, *backends, method.experts_cls.__name__])
    elif kind == "GateLinear":
        allowed = [key for key, on in vars(module).items() if key.startswith("allow_") and on]
        yield "router", ", ".join(allowed) or "plain GEMM"
    elif kind == "ParallelLMHead":
        yield "LM head", " > ".join(method_chain(method))
    else:
        yield f"linear {'.'.join(name.split('.')[-2:])}", " > ".join(method_chain(method))


def write_choices(capability: str, plans: Path, trees: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        fake_device(capability, Path(folder))
        import vllm.model_executor.models.qwen3_5  # noqa: F401  # once, for every child

        wanted = [(case, pinned) for case in read_cases(plans) for pinned in (True, False)]
        # A process per case: engines keep choices in globals.
        with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
            jobs = [pool.apply_async(_in_child, (case, trees, pinned)) for case, pinned in wanted]
            choices: dict[str, dict[str, Any]] = {}
            for (case, pinned), job in zip(wanted, jobs, strict=True):
                choices.setdefault(case.name, {})["pinned" if pinned else "free"] = job.get()
    out.write_text(json.dumps(choices))


def _in_child(case: Case, trees: Path, pinned: bool) -> dict[str, str]:
    try:
        return record_choices(case, trees, pinned=pinned)
    except Exception as error:  # the engine's own cannot be sent to another process
        raise RuntimeError(f"{case.name}, pinned={pinned}: {error!r}"[:2000]) from None


def compare(plans: Path, choices: dict[str, dict[str, Any]]) -> dict[str, Any]:
    cases, differences = {}, {}
    for case in read_cases(plans):
        engine = case.plan["release"]["engine"]
        by_device = {device: choices[device][case.name] for device in DEVICES}
        cases[case.name] = {"pins": read_pins(engine["argv"], engine["env"]), **by_device}
        for form in ("pinned", "free"):
            first, second = (by_device[device][form] for device in DEVICES)
            for choice in sorted({*first, *second}):
                values = (first.get(choice, "none"), second.get(choice, "none"))
                if values[0] != values[1]:
                    differences.setdefault((choice, values), {}).setdefault(form, []).append(
                        case.name
                    )
    return {
        "cases": cases,
        "differences": [
            {
                "choice": choice, **dict(zip(DEVICES, values, strict=True)),
                "without_pins": cases.get("free", []), "planned": cases.get("pinned", []),
                "note": find_note(choice, values) if "pinned" in cases else None,
            }
            for (choice, values), cases in sorted(differences.items())
        ],
    }  # fmt: skip


def main() -> None:
    plans, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    packages = ("vllm", "torch", "triton", "flashinfer-python")
    run = describe_run("no GPU; compute capability faked", *packages)
    if len(sys.argv) == 5:
        write_choices(sys.argv[4], plans, Path(sys.argv[3]), out)
        return
    with tempfile.TemporaryDirectory() as folder:
        trees = Path(folder) / "trees"
        write_trees(trees)
        choices = {}
        for device in DEVICES:
            part = Path(folder) / f"{device}.json"
            command = [sys.executable, "-m", "proofs.engine.backends", str(plans), str(part)]
            subprocess.run([*command, str(trees), device], check=True)
            choices[device] = json.loads(part.read_text())
    compared = compare(plans, choices)
    open_choices = [
        difference["choice"]
        for difference in compared["differences"]
        if difference["planned"] and not difference["note"]
    ]
    claim = "every difference between both capabilities is pinned or explained"
    document = {
        "command": "make backends",
        **run,
        "devices": DEVICES,
        "rows": [row(claim, not open_choices, [], open=open_choices)],
        **compared,
    }
    write_result(out, document)
    print_rows(document["rows"])


if __name__ == "__main__":
    main()
