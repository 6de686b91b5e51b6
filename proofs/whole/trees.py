"""Write an INT4 base and an FP8 source of random weights within seconds, a file per layer.

Weights have random signs and mantissas and a single exponent. Only the shared experts of the FP8
source have true sizes.
"""

import functools
import json
import multiprocessing
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from spark_contract.builder_api import expand_all

from lab.model import original, repository, rounding, vocabulary
from lab.model.safetensors import INDEX, file_header, write_file
from lab.model.shape import GROUP, Shape, int4_config
from proofs.trees.build import build, names_of
from proofs.trees.special import describe_packed_drafter

# Random bits of a 16-bit word, and fixed bits: weights of +-1/64 to 1/32, scales of 1/256 to 1/128.
MASKS = {"I32": (0xFFFF, 0), "BF16": (0x807F, 0x3C80), "F16": (0x03FF, 0x1C00)}
POOL_WORDS = 1 << 25
ITEM_BYTES = {"I32": 4, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
VISION = {"depth": 27, "hidden": 1152, "heads": 16, "width": 4304, "positions": 2304}
Entry = tuple[str, str, tuple[int, ...]]


def shape_of(model: dict[str, Any]) -> Shape:
    """Return the lab's shape for an architecture of the catalog."""
    net = model["linear_attention"]
    return Shape(
        layers=model["layers"],
        attention_interval=model["full_attention_every"],
        hidden=model["hidden"],
        vocabulary=model["vocabulary"],
        experts=model["experts"],
        experts_per_token=model["experts_per_token"],
        expert_width=model["expert_width"],
        shared_width=model["shared_expert_width"],
        heads=model["attention_heads"],
        kv_heads=model["kv_heads"],
        head_dim=model["head_width"],
        linear_key_heads=net["key_heads"],
        linear_value_heads=net["value_heads"],
        linear_head_dim=net["head_width"],
        max_positions=model["max_context_tokens"],
        **{f"vision_{name}": size for name, size in VISION.items()},
    )


def prepare(engines: list[dict[str, Any]], work: Path) -> dict[str, dict[str, Any]]:
    """Write and build all checkpoints at the same time; return seconds and sizes by model."""
    built = {engine["model"]: engine for engine in engines if engine["build"]}
    new = multiprocessing.get_context("spawn")  # threads must not fork
    with ProcessPoolExecutor(mp_context=new) as pool, ThreadPoolExecutor() as threads:
        jobs = {name: threads.submit(_make, built[name], work, pool) for name in built}
        return {name: job.result() for name, job in jobs.items()}


def _make(engine: dict[str, Any], work: Path, pool: Executor) -> dict[str, Any]:
    model, plan = engine["model"], engine["build"]
    base, donor, out = (work / f"{model}-{kind}" for kind in ("base", "donor", "v2"))
    done = work / f"{model}.json"  # written last
    if done.exists():
        return dict(json.loads(done.read_text()))
    for tree in (base, donor, out):
        shutil.rmtree(tree, ignore_errors=True)
    int4_mtp = engine["architecture"]["mtp_scheme"] == "int4"
    started = time.monotonic()
    write_sources(base, donor, shape_of(engine["architecture"]), plan, int4_mtp, pool)
    written = time.monotonic()
    sources = {"base": {"dir": str(base), "revision": None}, "donor": {"dir": str(donor)}}
    build({**plan, **sources, "out": str(out)}, work)
    result = {
        "planned_bytes": engine["disk_bytes"],
        "written_bytes": tree_bytes(base, out),
        "tensors": len(names_of(out)),
        "write_s": round(written - started, 1),
        "build_s": round(time.monotonic() - written, 1),
    }
    done.write_text(json.dumps(result))
    print(f"phase=prepared model={model}", json.dumps(result), flush=True)
    return result


def tree_bytes(*trees: Path) -> int:
    """Return the size of the weights; trees may share files."""
    stats = [path.stat() for tree in trees for path in tree.glob("*.safetensors")]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def write_sources(
    base: Path, donor: Path, shape: Shape, plan: dict[str, Any], int4_mtp: bool, pool: Executor
) -> None:
    """Write base and FP8 source with the tensor names of a build plan."""
    base.mkdir(parents=True)
    donor.mkdir(parents=True)
    files: dict[str, list[Entry]] = {}
    for name, size in {**original.main_shapes(shape), **original.mtp_shapes(shape)}.items():
        files.setdefault(_file_of(name), []).extend(stored(name, size, int4_mtp))
    jobs = [
        pool.submit(_write_base_file, base, donor, file, entries)
        for file, entries in sorted(files.items(), key=lambda item: -size_of(item[1]))
    ]
    tokenizer = vocabulary.train(1024)
    repository.write_common(base, shape, tokenizer, int4_config(shape), "# random\n")
    quantization = json.loads((base / "config.json").read_text())["quantization_config"]
    (base / "quantization_config.json").write_text(json.dumps(quantization))
    if int4_mtp:
        describe_packed_drafter(base)
    _write_index(base, {name: file for file in files for name, _, _ in files[file]})
    placeholder = rounding.bf16(np.ones(1, np.float32))
    others = dict.fromkeys(expand_all(plan["donor_unmatched"]), placeholder)
    write_file(donor / "others.safetensors", others)
    swapped = {name: file for job in jobs for name, file in job.result().items()}
    _write_index(donor, {**swapped, **dict.fromkeys(others, "others.safetensors")})


def _write_index(tree: Path, owners: dict[str, str]) -> None:
    index = {"metadata": {"total_size": tree_bytes(tree)}, "weight_map": owners}
    (tree / INDEX).write_text(json.dumps(index))


def _file_of(name: str) -> str:
    if name.startswith("mtp."):
        return repository.MTP_FILE
    if name.startswith(original.LAYERS):
        return (
            f"model-layer-{int(name.removeprefix(original.LAYERS).split('.')[1]):02d}.safetensors"
        )
    large = name in ("lm_head.weight", "model.language_model.embed_tokens.weight")
    return f"model-{name.split('.')[-2] if large else 'rest'}.safetensors"


def stored(name: str, size: tuple[int, ...], int4_mtp: bool) -> Iterator[Entry]:
    packed_drafter = int4_mtp and name.startswith("mtp.layers.") and original.is_projection(name)
    if original.is_int4(name) or (packed_drafter and ".shared_expert." not in name):
        module, (rows, columns) = name.removesuffix(".weight"), size
        yield f"{module}.qweight", "I32", (columns // 8, rows)
        yield f"{module}.qzeros", "I32", (columns // GROUP, rows // 8)
        yield f"{module}.scales", "F16", (columns // GROUP, rows)
    else:
        yield name, "F32" if name.endswith(original.FLOAT32) else "BF16", size


def size_of(entries: Iterable[Entry]) -> int:
    return sum(ITEM_BYTES[dtype] * int(np.prod(size)) for _, dtype, size in entries)


def header_of(entries: list[Entry]) -> bytes:
    return file_header((*entry, size_of([entry])) for entry in entries)


def _write_base_file(base: Path, donor: Path, file: str, entries: list[Entry]) -> dict[str, str]:
    """Write a file of the base, and the FP8 shared experts of its layer; return their files."""
    source = np.random.Generator(np.random.SFC64(zlib.crc32(file.encode())))
    swapped = {}
    with (base / file).open("wb") as out:
        out.write(header_of(entries))
        for name, dtype, size in entries:
            values = _random(source, name, dtype, size)
            out.write(values.data)
            if ".shared_expert." in name and not name.startswith("mtp."):
                parts = rounding.fp8(rounding.bf16_values(values))
                module = name.removesuffix(".weight")
                swapped.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
    if swapped:
        write_file(donor / file, swapped)
    return dict.fromkeys(swapped, file)


def _random(
    source: np.random.Generator, name: str, dtype: str, size: tuple[int, ...]
) -> npt.NDArray[Any]:
    if name.endswith(".qzeros"):
        return np.full(size, 0x11111111 * (rounding.INT4_ZERO - 1), dtype="<u4")
    if dtype == "F32" or len(size) == 1:
        values = original.initial(source, name, size)
        return values if dtype == "F32" else rounding.bf16_bits(values)
    words, parts = _pool(dtype), []
    missing = size_of([(name, dtype, size)]) // 2
    while missing:
        start = int(source.integers(len(words) // 2))
        parts.append(words[start : start + missing])
        missing -= len(parts[-1])
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(*size[:-1], -1)


@functools.cache
def _pool(dtype: str) -> npt.NDArray[np.uint16]:
    """Return 64 MB of random words of a type; tensors are slices at random places."""
    random = np.random.default_rng(0).integers(1 << 16, size=POOL_WORDS, dtype="<u2")
    mantissa, exponent = MASKS[dtype]
    return random & np.uint16(mantissa) | np.uint16(exponent)
