"""Compile, without running, the kernels of the engine's attention backends on a Spark.

The engine's backends and launchers run over tensors that have only types, shapes and strides, so no
kernel constant is copied here; Triton specialises and compiles the launched kernels. Needs triton
(`make kernels`), no torch, no GPU.
"""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

OPS, CONFIG = "vllm.v1.attention.ops", "vllm.model_executor.layers.quantization.turboquant.config"
BACKEND = "vllm.v1.attention.backends.turboquant_attn"
REAL = [f"{OPS}.triton_decode_attention", f"{OPS}.triton_turboquant_decode"]
REAL += [f"{OPS}.triton_turboquant_store", CONFIG, BACKEND]
FILES = {f"{name.replace('.', '/')}.py" for name in REAL}
CAPABILITY = 121
HEAD_SIZE, KV_HEADS, SPLITS = 256, 2, 32
"""As in the 35B and the 122B; SPLITS is the engine's default."""
ITEM_BYTES = {"int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2}
ITEM_BYTES |= {"int32": 4, "float32": 4, "int64": 8}
FP8 = SimpleNamespace(min=-448.0, max=448.0)


class Usage(NamedTuple):
    kernel: str
    architecture: str
    shared_bytes: int
    registers: int
    spilled_bytes: int


class Tensor:
    device = SimpleNamespace(index=0)
    address = 0

    def __init__(self, *shape: int, dtype: str, strides: tuple[int, ...] = (), **_: Any) -> None:
        self.shape, self.dtype = shape, dtype
        self.strides = strides or tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        self.address = Tensor.address

    def data_ptr(self) -> int:
        return self.address

    def stride(self, at: int | None = None) -> Any:
        return self.strides if at is None else self.strides[at]

    def element_size(self) -> int:
        return ITEM_BYTES[self.dtype]

    def alias(self, address: int, dtype: str, *shape: int, strides: tuple[int, ...]) -> Tensor:
        """Return other numbers of the same memory."""
        tensor = Tensor(*shape, dtype=dtype, strides=strides)
        tensor.address = address
        return tensor

    def view(self, dtype: str) -> Tensor:
        assert ITEM_BYTES[dtype] == self.element_size()
        return self.alias(self.address, dtype, *self.shape, strides=self.strides)

    def split(self, size: int, dim: int) -> tuple[Tensor, ...]:
        assert dim == -1
        shape, step = (*self.shape[:-1], size), self.strides[-1] * self.element_size()
        return tuple(
            self.alias(self.address + first * step, self.dtype, *shape, strides=self.strides)
            for first in range(0, self.shape[-1], size)
        )

    def to(self, dtype: str) -> Tensor:
        return Tensor(*self.shape, dtype=dtype)

    def float(self) -> Tensor:
        return self.to("float32")

    def contiguous(self) -> Tensor:
        return self.to(self.dtype)

    def reshape(self, *shape: int) -> Tensor:
        rest = math.prod(self.shape) // abs(math.prod(shape))
        return Tensor(*(rest if size < 0 else size for size in shape), dtype=self.dtype)

    def transpose(self, first: int, second: int) -> Tensor:
        order = list(range(len(self.shape)))
        order[first], order[second] = second, first
        shape, strides = ([sizes[at] for at in order] for sizes in (self.shape, self.strides))
        return self.alias(self.address, self.dtype, *shape, strides=tuple(strides))

    def norm(self, dim: int, keepdim: bool) -> Tensor:
        return Tensor(self.shape[0], 1, dtype=self.dtype)

    def squeeze(self, dim: int) -> Tensor:
        return Tensor(self.shape[0], dtype=self.dtype)

    def __add__(self, other: Any) -> Tensor:
        return self

    __truediv__ = __matmul__ = __add__

    def __getitem__(self, key: Any) -> Tensor:
        keys = [*(key if isinstance(key, tuple) else (key,)), *[slice(None)] * len(self.shape)]
        kept = [
            (len(range(size)[part]), stride)
            for part, size, stride in zip(keys, self.shape, self.strides, strict=False)
            if isinstance(part, slice)
        ]
        shape, strides = zip(*kept, strict=True)
        return Tensor(*shape, dtype=self.dtype, strides=strides)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __len__(self) -> int:
        return self.shape[0]

    def copy_(self, other: Tensor) -> None:
        assert other.shape == self.shape

    def fill_(self, value: float) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Tensor:
        return self

    def set_(self, storage: Tensor) -> Tensor:
        self.address = storage.address
        return self


def empty(*shape: Any, dtype: str, **_: Any) -> Tensor:
    [*sizes] = shape[0] if isinstance(shape[0], tuple) else shape
    return Tensor(*sizes, dtype=dtype)


def as_strided(
    tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int
) -> Tensor:
    address = tensor.address + storage_offset * tensor.element_size()
    return tensor.alias(address, tensor.dtype, *size, strides=stride)


class _StubType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub

    def __getitem__(cls, key: Any) -> Any:
        return cls


class Stub(metaclass=_StubType):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(__getattr__=lambda _: Stub, **members)
    return made


def _stub_modules() -> dict[str, ModuleType]:
    import triton
    import triton.language

    workspace = SimpleNamespace(
        get_simultaneous=lambda *buffers: [Tensor(*shape, dtype=dtype) for shape, dtype in buffers]
    )
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        fp8_dtype=lambda: "float8_e4m3fn",
        get_device_name=lambda: "GB10",
        get_device_capability=lambda: None,
        has_device_capability=lambda least: least <= CAPABILITY,
        is_device_capability=lambda pair: pair == divmod(CAPABILITY, 10),
        is_device_capability_family=lambda family: family // 10 == CAPABILITY // 10,
        num_compute_units=lambda: 48,
    )
    config = SimpleNamespace(
        attention_config=SimpleNamespace(tq_max_kv_splits_for_cuda_graph=SPLITS),
        model_config=SimpleNamespace(max_model_len=262144),
    )
    cuda = SimpleNamespace(get_device_capability=lambda _: divmod(CAPABILITY, 10))
    made: dict[str, Any] = {"empty": empty, "zeros": empty, "as_strided": as_strided}
    made["tensor"] = lambda values, dtype, **_: Tensor(len(values), dtype=dtype)
    made |= {"Tensor": Tensor, "cuda": cuda, "finfo": lambda _: FP8}
    torch = module("torch", **made, **{name: name for name in ITEM_BYTES})
    named = [
        torch,
        module("torch.nn"),
        module("torch.nn.functional"),
        module("vllm.platforms", current_platform=platform),
        module("vllm.triton_utils", tl=triton.language, triton=triton),
        module("vllm.config", get_current_vllm_config=lambda: config),
        module(f"{OPS}.flydsl_turboquant_decode", is_flydsl_available=lambda: False),
        module("vllm.v1.worker.workspace", current_workspace_manager=lambda: workspace),
    ]
    plain = ["config.cache", "logger", "utils.math_utils", "v1.attention.backend"]
    plain += ["v1.attention.backends.fa_utils", "v1.attention.backends.utils"]
    plain += ["v1.kv_cache_interface", f"{CONFIG[5:-7]}.centroids"]
    return {stub.__name__: stub for stub in named + [module(f"vllm.{name}") for name in plain]}


@contextmanager
def engine(
    root: Path, names: Iterable[str] = REAL, stubs: Iterable[ModuleType] = ()
) -> Iterator[list[Any]]:
    """Import the engine's modules ``names`` from ``root``; yield the list of launched kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import KernelInterface

    launched: list[Any] = []

    def compile_launch(kernel: Any, grid: Any) -> Any:
        return lambda *args, **named: launched.append(
            kernel.run(*args, grid=grid, warmup=True, **named)
        )

    spark = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 121, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )
    with (
        patch.dict(sys.modules, _stub_modules()),
        patch.dict(sys.modules, {stub.__name__: stub for stub in stubs}),
        patch.object(driver, "_active", spark),
        patch.object(KernelInterface, "__getitem__", compile_launch),
    ):
        for name in names:
            path = root / f"{name.replace('.', '/')}.py"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec
            assert spec.loader
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        yield launched


def launches(root: Path, preset: str, heads: int, block: int, even: bool) -> list[Usage]:
    """Store, decode and read back 16-bit values; return the usage of every kernel.

    Args:
        root: where the engine's sources are.
        preset: a TurboQuant preset.
        heads: query heads.
        block: tokens in a block of the cache.
        even: whether addresses and widths are multiples of 16.
    """
    tokens, blocks = 3, 4096 if even else 4097
    with engine(root) as launched, patch.object(Tensor, "address", 4096 if even else 4097):
        impl = sys.modules[BACKEND].TurboQuantAttentionImpl(
            heads, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, kv_cache_dtype=preset
        )
        slot = impl.tq_config.slot_size_aligned
        page = block * KV_HEADS * slot + (0 if even else 1)
        strides = (page, KV_HEADS * slot, slot, 1)
        cache = Tensor(blocks, block, KV_HEADS, slot, dtype="uint8", strides=strides)
        query = Tensor(tokens, heads, HEAD_SIZE, dtype="bfloat16")
        key = Tensor(tokens, KV_HEADS, HEAD_SIZE, dtype="bfloat16")
        square, line = Tensor(HEAD_SIZE, HEAD_SIZE, dtype="float32"), Tensor(16, dtype="float32")
        layer = SimpleNamespace(_tq_PiT=square, _tq_midpoints=line, _tq_Pi_half=square)
        table, rows = Tensor(tokens, blocks, dtype="int32"), Tensor(tokens, dtype="int32")
        batch = SimpleNamespace(block_table=table, seq_lens=rows, max_seq_len=8192)
        impl._store_kv(key, key, cache, Tensor(tokens, dtype="int64"), layer)
        impl._decode_attention(query, cache, batch, square, line, square, layer)
        impl._continuation_prefill(
            layer, query, key, key, cache, table[0:1], 4096, 4096 + tokens, square, line
        )
        return [read_usage(kernel) for kernel in launched]


def read_usage(kernel: Any) -> Usage:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    [architecture] = re.findall(r"^\.target (\w+)", kernel.asm["ptx"], re.M)
    spilled = used["STACK"] + used["LOCAL"]
    metadata = kernel.metadata
    return Usage(metadata.name, architecture, metadata.shared, used["REG"], spilled)
