"""Quantize a 16-bit checkpoint with AutoRound in a container."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from spark_contract import files
from spark_contract.builder_api import RequantizePlan, expand
from spark_contract.fetching import CopyPlan, TransferOptions
from spark_contract.files import now, sync
from spark_contract.receipts import ReceiptFile, RequantizedReceipt
from spark_contract.records import GpuProof

from spark_checkpoint import TOOL_VERSION, TransferError, ValidationError, storage, verify
from spark_checkpoint.build.layouts import set_blocks
from spark_checkpoint.build.write import NewTensor
from spark_checkpoint.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    Checkpoint,
    Span,
    list_files,
    read_checkpoint,
    read_config,
    read_json,
    read_span,
)
from spark_checkpoint.headers import SIXTEEN_BIT
from spark_checkpoint.number_formats import (
    GROUP,
    INT4_LIMIT,
    packed_tensors,
    read_floats,
    relative_error,
    to_floats,
    unpack_int4,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.sources.fetch import fetch
from spark_checkpoint.sources.peers import copy_from_peer, copy_requantized
from spark_checkpoint.tensor_sets import MTP_PREFIX, WEIGHT, check_quantized_names

OUTPUT_DIR, RESUME, JOB, SCRIPT = "made", "resume", "order.json", "autoround_job.py"
DONE = "done.json"  # written last: names the result's directory in OUTPUT_DIR, and versions
RESUMABLE = frozenset({OUTPUT_DIR, RESUME, DONE})
_POLL_S, _STOP_TIMEOUT_S = 2.0, 20
QWEIGHT = ".qweight"
_MAX_COMPARED = 512  # number of packed modules to compare, evenly spaced
_EXPERT = re.compile(r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj$")
_FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
_ORIGINAL_FIX = "set the model's sources.original to the 16-bit repository"
_CHANGED = "must stay unchanged, but differs from the original"
_FIX = "read AutoRound's messages in the job's log"
# AutoRound tunes these layers in the language model, but only rounds them in the drafter.
_LAYERS = re.compile(r"(model\.language_model|mtp)\.layers\.\d+\.")
_GATES = (".gate", ".shared_expert_gate")
_ROWS_MULTIPLE = 32


def requantize(plan: RequantizePlan, progress: Progress, copies: CopyPlan | None = None) -> None:
    """Quantize the plan's checkpoint or copy it from a peer, unless it already exists."""

    def write(work: Path, result_dir: Path) -> None:
        def copy(transfer: TransferOptions, files_url: str, receipt: RequantizedReceipt) -> None:
            copy_requantized(transfer, files_url, receipt, plan, result_dir, progress)

        is_copied = copies is not None and copy_from_peer(
            copies, plan, result_dir, RequantizedReceipt, copy
        )
        if not is_copied:
            _write_result(plan, work, result_dir, progress)

    verify.create_checkpoint(plan, f"plan {plan.digest[:12]}", progress, write)


def _write_result(plan: RequantizePlan, work: Path, result_dir: Path, progress: Progress) -> None:
    fetch(plan.original, progress)
    progress.start_phase("check-sources")
    original = read_checkpoint(plan.original.out_dir)
    check_original(original)
    check_packable(plan, original)
    storage.clear(work, keep=RESUMABLE)
    if not (work / DONE).exists():
        _run_autoround(plan, work, progress)
    output = work / OUTPUT_DIR / str(read_json(work / DONE)["tree"])
    result_dir.mkdir()
    for name in list_files(output):
        # Hard links, so that the work folder keeps the files if the result is rejected.
        target = result_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(output / name, target)
    result = read_checkpoint(result_dir)
    check_quantized_names(str(result_dir), result.owner.keys(), plan)
    if not (result_dir / INDEX_NAME).exists():
        total = sum((result_dir / shard).stat().st_size for shard in set(result.owner.values()))
        weight_map = dict(sorted(result.owner.items()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        storage.write_json(result_dir / INDEX_NAME, index)
    _add_missing_packed_blocks(result_dir, result.owner)
    receipt = RequantizedReceipt(
        kind="requantized",
        digest=plan.digest,
        files=tuple(_hash_and_sync(result_dir, progress)),
        tool_version=TOOL_VERSION,
        written_at=now(),
        plan=plan,
        tensors=len(result.owner),
        report={**read_json(work / DONE), **check_result(original, result)},
    )
    verify.write_receipt(result_dir, receipt)


def _add_missing_packed_blocks(result_dir: Path, owner: dict[str, str]) -> None:
    """Complete the list of packed blocks, because a resumed AutoRound run omits the drafter's."""
    for name in (CONFIG_NAME, QUANTIZATION_NAME):
        path = result_dir / name
        config = read_json(path) if path.exists() else {}
        quantization = config.get("quantization_config", config)
        if isinstance(quantization, dict) and "block_name_to_quantize" in quantization:
            set_blocks(quantization, owner)
            storage.write_json(path, config)


def _hash_and_sync(result_dir: Path, progress: Progress) -> list[ReceiptFile]:
    """Sync the files, let only root write to them, and return their receipt entries."""
    names = list_files(result_dir)
    progress.start_phase("hash", sum((result_dir / name).stat().st_size for name in names))

    def make_entry(name: str) -> ReceiptFile:
        path = result_dir / name
        path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
        sha256 = storage.hash_file(path, progress.add)
        return verify.receipt_entry(name, storage.read_stamp(path), sha256)

    with ThreadPoolExecutor(storage.WORKERS) as pool:
        return list(pool.map(make_entry, names))


def _run_autoround(plan: RequantizePlan, work: Path, progress: Progress) -> None:
    output = work / OUTPUT_DIR
    # Without finished blocks, the resume files are useless.
    if not any(output.glob("**/model-shard-*")):
        for directory in (OUTPUT_DIR, RESUME):
            shutil.rmtree(work / directory, ignore_errors=True)
    check_prerequisites(plan, work)
    output.mkdir(exist_ok=True)
    (work / RESUME).mkdir(exist_ok=True)
    drafter = [
        module
        for module in _modules(plan, WEIGHT)
        if module.startswith(MTP_PREFIX) and "norm" not in module
    ]
    job = {
        "int4": list(packed_modules(plan)),
        "drafter_kept": drafter,
        "iters": plan.iters,
        "nsamples": plan.nsamples,
        "seqlen": plan.seqlen,
        "batch": plan.batch,
    }
    storage.write_json(work / JOB, job)
    script = resources.files("spark_checkpoint").joinpath(SCRIPT)
    files.write_text(work / SCRIPT, script.read_text(encoding="utf-8"))
    container = f"spark-requantize-{plan.digest[:12]}"
    _run_docker("rm", "--force", container)
    try:
        process = subprocess.Popen(_build_argv(plan, work, container))
        _wait_for_container(process, work, plan.layers, progress)
    except BaseException:
        # The container must not outlive this process.
        _run_docker("stop", "--time", str(_STOP_TIMEOUT_S), container)
        raise


def check_prerequisites(plan: RequantizePlan, work: Path) -> None:
    fix = "run `spark-deploy add --requantize` for this host"
    for path, content in ((plan.packages, "AutoRound"), (plan.calibration, "calibration text")):
        if not os.path.exists(path):
            raise ValidationError(path, f"{content} is missing", fix)
    unwritten_bytes = plan.work_bytes - storage.used_bytes(work)
    storage.check_free_space(work.parent, unwritten_bytes, f"quantizing {plan.name}")
    match = re.search(r"^MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if match and (available := int(match[1]) * 1024) < plan.memory_bytes:
        problem = f"needs {plan.memory_bytes} bytes of memory, but only {available} are available"
        fix = "run `spark-deploy stop` for this host, then run the job again"
        raise ValidationError(f"quantizing {plan.name}", problem, fix)


def _build_argv(plan: RequantizePlan, work: Path, container: str) -> Sequence[str]:
    gpu = files.load(
        GpuProof, Path(plan.gpu), "is missing: the GPU container check has not passed"
    ).docker_arguments
    mounts = {
        plan.original.out: "/model,readonly",
        plan.packages: "/packages,readonly",
        plan.calibration: "/calibration.jsonl,readonly",
        str(work): "/work",
    }
    argv = ["docker", "run", "--rm", "--restart", "no", "--name", container, "--network", "none"]
    argv += ["--log-driver", "none", "--entrypoint", "python3", *gpu]
    for source, target in mounts.items():
        argv += ["--mount", f"type=bind,source={source},target={target}"]
    return [*argv, plan.image, f"/work/{SCRIPT}"]


def _wait_for_container(
    process: subprocess.Popen[bytes], work: Path, layers: int, progress: Progress
) -> None:
    """Report finished blocks until the container exits; raise if it failed."""
    code, reported = None, -1
    while code is None:
        if (finished := _count_blocks(work)) != reported:
            reported = finished
            progress.start_phase(f"quantized-{finished}-of-{layers}-blocks")
        try:
            code = process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
    if code != 0:
        finished = _count_blocks(work)
        problem = f"AutoRound exited with status {code} after {finished} of {layers} blocks"
        raise TransferError(str(work), problem, "read the messages above, then run the job again")
    if not (work / DONE).exists():
        problem = "AutoRound ended before the checkpoint was complete"
        raise TransferError(str(work), problem, "run the job again")


def _count_blocks(work: Path) -> int:
    manifests = work.glob(f"{RESUME}/group_*/resume_manifest.json")
    return sum(len(json.loads(path.read_bytes())["completed_blocks"]) for path in manifests)


def _run_docker(*args: str) -> None:
    subprocess.run(("docker", *args), capture_output=True, check=False)


def find_weight(module: str, original: Checkpoint) -> NewTensor:
    name = module + WEIGHT
    if name in original.owner:
        tensor = original.tensor(name)
        return NewTensor(name, tensor.dtype, tensor.shape, original.span(name))
    expert = find_fused_expert(module, original)
    if expert is None:
        raise ValidationError(module, "the original lacks this weight", _ORIGINAL_FIX)
    return expert


def find_fused_expert(module: str, original: Checkpoint) -> NewTensor | None:
    """Return an expert's slice of a fused tensor, where gate rows precede up rows, or None."""
    match = _EXPERT.match(module)
    if not match:
        return None
    projection = "down_proj" if match["part"] == "down" else "gate_up_proj"
    name = f"{match['layer']}.{projection}"
    if name not in original.owner:
        name += WEIGHT
    if name not in original.owner or len(original.tensor(name).shape) != 3:
        return None
    tensor, expert = original.tensor(name), int(match["expert"])
    experts, rows, columns = tensor.shape
    if expert >= experts:
        return None
    path, offset, size_bytes = original.span(name)
    size_bytes //= experts
    offset += expert * size_bytes
    if projection == "gate_up_proj":
        rows, size_bytes = rows // 2, size_bytes // 2
        if match["part"] == "up":
            offset += size_bytes
    return NewTensor(module + WEIGHT, tensor.dtype, (rows, columns), Span(path, offset, size_bytes))


def check_packable(plan: RequantizePlan, original: Checkpoint) -> None:
    for module in packed_modules(plan):
        reason = skip_reason(module) or _unpackable_reason(find_weight(module, original))
        if reason:
            problem = f"must be packed, but AutoRound would skip it: {reason}"
            fix = f"list {module}{WEIGHT} under `tensors` in the model file instead"
            raise ValidationError(module, problem, fix)


def packed_modules(plan: RequantizePlan) -> Iterator[str]:
    return _modules(plan, QWEIGHT)


def _modules(plan: RequantizePlan, suffix: str) -> Iterator[str]:
    for pattern in (*plan.base_tensors, *plan.mtp_tensors):
        for name in expand(pattern):
            if name.endswith(suffix):
                yield name.removesuffix(suffix)


def skip_reason(module: str) -> str:
    if not _LAYERS.match(module):
        return "it is not in any layer of the language model or the drafter"
    return "it is a gate" if module.endswith(_GATES) else ""


def _unpackable_reason(matrix: NewTensor) -> str:
    if len(matrix.shape) != 2:
        return f"its shape is {list(matrix.shape)}, expected a matrix"
    rows, columns = matrix.shape
    if rows % _ROWS_MULTIPLE:
        return f"its row count, {rows}, is not a multiple of {_ROWS_MULTIPLE}"
    if columns % GROUP:
        return f"its column count, {columns}, is not a multiple of {GROUP}"
    return ""


def check_original(original: Checkpoint) -> None:
    where = str(original.directory)
    if read_config(original.directory).get("quantization_config"):
        raise ValidationError(where, "is already quantized", _ORIGINAL_FIX)
    for name in sorted(original.owner):
        dtype = original.tensor(name).dtype
        if dtype not in _FLOAT_DTYPES:
            raise ValidationError(
                where, f"{name} is {dtype}, expected a floating-point dtype", _ORIGINAL_FIX
            )


def check_result(original: Checkpoint, result: Checkpoint) -> dict[str, Any]:
    """Check that the result is the rounded original; return measurements for the receipt."""
    if result.duplicates:
        name = min(result.duplicates)
        raise ValidationError(str(result.directory), f"contains {name} in several files", _FIX)
    packed = sorted(name.removesuffix(QWEIGHT) for name in result.owner if name.endswith(QWEIGHT))
    quantization = read_config(result.directory).get("quantization_config")
    expected = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}
    if not isinstance(quantization, Mapping) or not expected.items() <= quantization.items():
        where = f"{result.directory}/{CONFIG_NAME}"
        raise ValidationError(where, f"lacks {expected} in quantization_config", _FIX)
    for module in packed:
        _check_packed_shapes(module, original, result)
    for name in result.owner:
        if name in original.owner and not _is_same(name, original, result):
            raise ValidationError(name, _CHANGED, _FIX)
    step = max(1, -(-len(packed) // _MAX_COMPARED))
    errors = {module: _packing_error(module, original, result) for module in packed[::step]}
    # `not <=` also finds NaN.
    wrong = {module: error for module, error in errors.items() if not error <= INT4_LIMIT}
    if wrong:
        module = max(wrong, key=lambda module: wrong[module])
        difference = f"weights differ from the original model's by {wrong[module]:.0%}"
        raise ValidationError(module, f"{difference}; {len(wrong)} modules exceed the limit", _FIX)
    mean = float(np.mean(list(errors.values())))
    error = {"modules": len(errors), "mean": mean, "worst": max(errors.values())}
    check_kept_experts(original, result)
    return {"packed_modules": len(packed), "error": error}


def _check_packed_shapes(module: str, original: Checkpoint, result: Checkpoint) -> None:
    expected = packed_tensors(find_weight(module, original).shape, bits=4)
    for suffix, (dtype, shape) in expected.items():
        tensor = result.tensor(module + suffix)
        dtypes = SIXTEEN_BIT if dtype == "BF16" else {dtype}
        if tensor.dtype not in dtypes or tensor.shape != shape:
            problem = f"is {tensor.dtype} {list(tensor.shape)}, expected {list(shape)}"
            raise ValidationError(module + suffix, problem, _FIX)


def check_kept_experts(original: Checkpoint, result: Checkpoint) -> None:
    """Check 16-bit experts that were split from a fused tensor."""
    for name in sorted(result.owner.keys() - original.owner.keys()):
        expert = find_fused_expert(name.removesuffix(WEIGHT), original)
        if name.endswith(WEIGHT) and expert is not None:
            has_same_bytes = _hash(expert.span) == _hash(result.span(name))
            if not has_same_bytes or expert.shape != result.tensor(name).shape:
                raise ValidationError(name, _CHANGED, _FIX)


def _is_same(name: str, original: Checkpoint, result: Checkpoint) -> bool:
    before, after = original.tensor(name), result.tensor(name)
    if before.dtype != after.dtype:  # AutoRound converts small tensors
        return np.array_equal(read_floats(original, name), read_floats(result, name))
    return before.shape == after.shape and _hash(original.span(name)) == _hash(result.span(name))


def _packing_error(module: str, original: Checkpoint, result: Checkpoint) -> float:
    matrix = find_weight(module, original)
    weight = to_floats(read_span(matrix.span), matrix.dtype, matrix.shape)
    return relative_error(weight, unpack_int4(result, module))


def _hash(span: Span) -> str:
    return storage.hash_file(span.path, offset=span.offset, size_bytes=span.size_bytes)
