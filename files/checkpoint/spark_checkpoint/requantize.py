"""Quantize a 16-bit checkpoint with AutoRound in a container."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

from spark_contract import files
from spark_contract.builder_api import RequantizePlan, expand
from spark_contract.fetching import CopyPlan, TransferOptions
from spark_contract.files import now, sync
from spark_contract.receipts import ReceiptFile, RequantizedReceipt
from spark_contract.records import GpuProof

from spark_checkpoint import TOOL_VERSION, requantize_checks, storage, verify
from spark_checkpoint.build.layouts import set_blocks
from spark_checkpoint.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    list_files,
    read_checkpoint,
    read_json,
)
from spark_checkpoint.errors import TransferError, ValidationError
from spark_checkpoint.progress import Progress
from spark_checkpoint.sources.fetch import fetch
from spark_checkpoint.sources.peers import copy_from_peer, copy_requantized
from spark_checkpoint.tensor_sets import MTP_PREFIX, WEIGHT, check_quantized_names

OUTPUT_DIR, RESUME, JOB, SCRIPT = "made", "resume", "order.json", "autoround_job.py"
DONE = "done.json"  # written last: names the result's directory in OUTPUT_DIR, and versions
RESUMABLE = frozenset({OUTPUT_DIR, RESUME, DONE})
_POLL_S = 2.0
_STOP_TIMEOUT_S = 20


def requantize(plan: RequantizePlan, progress: Progress, copies: CopyPlan | None = None) -> bool:
    """Quantize the plan's checkpoint or copy it from a peer; return False if it already exists."""

    def write(work: Path, result_dir: Path) -> None:
        def copy(transfer: TransferOptions, files_url: str, receipt: RequantizedReceipt) -> None:
            copy_requantized(transfer, files_url, receipt, plan, result_dir, progress)

        if copies is None or not copy_from_peer(copies, plan, result_dir, RequantizedReceipt, copy):
            _write_result(plan, work, result_dir, progress)

    return verify.create_checkpoint(plan, f"plan {plan.digest[:12]}", progress, write)


def _write_result(plan: RequantizePlan, work: Path, result_dir: Path, progress: Progress) -> None:
    fetch(plan.original, progress)
    progress.start_phase("check-sources")
    original = read_checkpoint(plan.original.out_dir)
    requantize_checks.check_original(original)
    requantize_checks.check_packable(plan, original)
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
        report={**read_json(work / DONE), **requantize_checks.check_result(original, result)},
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
    _check_prerequisites(plan, work)
    output.mkdir(exist_ok=True)
    (work / RESUME).mkdir(exist_ok=True)
    drafter = [
        name.removesuffix(WEIGHT)
        for pattern in (*plan.base_tensors, *plan.mtp_tensors)
        for name in expand(pattern)
        if name.startswith(MTP_PREFIX) and name.endswith(WEIGHT) and "norm" not in name
    ]
    job = {
        "int4": list(requantize_checks.packed_modules(plan)),
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


def _check_prerequisites(plan: RequantizePlan, work: Path) -> None:
    fix = "run `spark-deploy add --requantize` for this host"
    for path, content in ((plan.packages, "AutoRound"), (plan.calibration, "calibration text")):
        if not os.path.exists(path):
            raise ValidationError(path, f"{content} is missing", fix)
    storage.check_free_space(work.parent, plan.work_bytes, f"quantizing {plan.name}")
    for line in Path("/proc/meminfo").read_text().splitlines():
        available = int(line.split()[1]) * 1024 if line.startswith("MemAvailable:") else None
        if available is not None and available < plan.memory_bytes:
            problem = (
                f"needs {plan.memory_bytes} bytes of memory, but only {available} are available"
            )
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
