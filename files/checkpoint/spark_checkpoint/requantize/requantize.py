"""Quantise a 16-bit checkpoint with AutoRound in a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

from spark_contract import files
from spark_contract.fetching import CopyPlan
from spark_contract.files import now, sync
from spark_contract.orders import RequantizePlan, expand
from spark_contract.receipts import ReceiptFile, RequantizedReceipt
from spark_contract.records import GpuProof

from spark_checkpoint import TOOL_VERSION
from spark_checkpoint.build.layouts import set_blocks
from spark_checkpoint.errors import GateRefused, TransferFailed
from spark_checkpoint.format.directory import (
    CONFIG_NAME,
    INDEX_NAME,
    QUANTIZATION_NAME,
    Checkpoint,
    files_of,
    read_checkpoint,
    read_json,
)
from spark_checkpoint.progress import Progress
from spark_checkpoint.receipt import vouched, write_receipt
from spark_checkpoint.requantize.checks import (
    GROUP,
    check_original,
    check_result,
    find_weight,
)
from spark_checkpoint.sources.fetch import fetch
from spark_checkpoint.sources.peers import copy_from_peer
from spark_checkpoint.storage import (
    WORKERS,
    clear,
    hash_file,
    refuse_without_room,
    stamp_of,
    write_json,
)
from spark_checkpoint.tensor_sets import MTP_PREFIX, WEIGHT, check_quantised_names
from spark_checkpoint.verify import make_checkpoint

MADE, RESUME, ORDER, SCRIPT = "made", "resume", "order.json", "autoround_job.py"
DONE = "done.json"  # written last: which folder of MADE is the tree, and with what it was made
_PACKED = ".qweight"
_POLL_S = 2.0
_STOP_S = 20


KEPT = frozenset({MADE, RESUME, DONE})  # of a work directory, by the next try


def quantise(plan: RequantizePlan, work: Path, progress: Progress) -> Path:
    """Run AutoRound in ``work``, resuming after finished blocks; return its output directory."""
    made = work / MADE
    if not (work / DONE).exists():
        _run(plan, work, progress)
    return made / str(read_json(work / DONE)["tree"])


def _run(plan: RequantizePlan, work: Path, progress: Progress) -> None:
    made = work / MADE
    # The blocks are written as they are done; without one of them the notes are of no use.
    if not any(made.glob("**/model-shard-*")):
        for name in (MADE, RESUME):
            shutil.rmtree(work / name, ignore_errors=True)
    _refuse_without_means(plan, work)
    made.mkdir(exist_ok=True)
    (work / RESUME).mkdir(exist_ok=True)
    write_json(work / ORDER, _order(plan))
    inside = resources.files("spark_checkpoint.requantize").joinpath(SCRIPT)
    files.write_text(work / SCRIPT, inside.read_text(encoding="utf-8"))
    name = f"spark-requantize-{plan.digest[:12]}"
    _docker("rm", "--force", name)
    try:
        _follow(subprocess.Popen(_argv(plan, work, name)), work, plan.layers, progress)
    except BaseException:
        # Whatever ends this process must not leave the container at work behind it.
        _docker("stop", "--time", str(_STOP_S), name)
        raise


def _order(plan: RequantizePlan) -> dict[str, object]:
    names = [
        name for pattern in (*plan.base_tensors, *plan.mtp_tensors) for name in expand(pattern)
    ]
    weights = (name for name in names if name.startswith(MTP_PREFIX) and name.endswith(WEIGHT))
    return {
        "int4": [name.removesuffix(_PACKED) for name in names if name.endswith(_PACKED)],
        "drafter_kept": [name.removesuffix(WEIGHT) for name in weights if "norm" not in name],
        "iters": plan.iters,
        "nsamples": plan.nsamples,
        "seqlen": plan.seqlen,
        "batch": plan.batch,
    }


def _argv(plan: RequantizePlan, work: Path, name: str) -> Sequence[str]:
    absent = "does not say how a container gets at the GPU"
    gpu = files.load(GpuProof, Path(plan.gpu), absent).docker_arguments
    mounts = {
        plan.original.out: "/model,readonly",
        plan.packages: "/packages,readonly",
        plan.calibration: "/calibration.jsonl,readonly",
        str(work): "/work",
    }
    argv = ["docker", "run", "--rm", "--restart", "no", "--name", name, "--network", "none"]
    argv += ["--log-driver", "none", "--entrypoint", "python3", *gpu]
    for source, target in mounts.items():
        argv += ["--mount", f"type=bind,source={source},target={target}"]
    return [*argv, plan.image, f"/work/{SCRIPT}"]


def _follow(child: subprocess.Popen[bytes], work: Path, layers: int, progress: Progress) -> None:
    told = -1
    while True:
        done = _blocks_done(work)
        if done != told:
            told = done
            progress.phase(f"quantised-{done}-of-{layers}-blocks")
        try:
            code = child.wait(_POLL_S)
            break
        except subprocess.TimeoutExpired:
            continue
    if code != 0:
        what = f"AutoRound ended with exit status {code}, {_blocks_done(work)} of {layers} blocks"
        raise TransferFailed(str(work), f"{what} are done", "see the lines above; run again")
    if not (work / DONE).exists():
        raise TransferFailed(str(work), "AutoRound ended before its tree was whole", "run again")


def _blocks_done(work: Path) -> int:
    """Return how many blocks AutoRound has noted as done; it writes its notes by renaming."""
    notes = work.glob(f"{RESUME}/group_*/resume_manifest.json")
    return sum(len(json.loads(note.read_bytes())["completed_blocks"]) for note in notes)


def _refuse_without_means(plan: RequantizePlan, work: Path) -> None:
    again = "run `spark-deploy add --requantize` for this host"
    for path, what in ((plan.packages, "AutoRound"), (plan.calibration, "the text to tune with")):
        if not os.path.exists(path):
            raise GateRefused(path, f"is not there: {what}", again)
    refuse_without_room(work.parent, plan.work_bytes, f"quantising {plan.name}")
    available = _available_bytes()
    if available < plan.memory_bytes:
        what = f"needs {plan.memory_bytes} bytes of memory, {available} are available"
        raise GateRefused(f"quantising {plan.name}", what, "`spark-deploy stop` this host first")


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise GateRefused("/proc/meminfo", "does not say MemAvailable", "use a kernel that does")


def _docker(*words: str) -> None:
    subprocess.run(("docker", *words), capture_output=True, check=False)


# The layers of the language model are tuned. The drafter's are never loaded; when the rest is
# made they are rounded to nearest, in the same packing, by AutoRound's
# `copy_missing_tensors_from_source`.


_LAYERS = re.compile(r"(model\.language_model|mtp)\.layers\.\d+\.")
_GATES = (".gate", ".shared_expert_gate")
_MULTIPLE = 32


def check_packable(plan: RequantizePlan, original: Checkpoint) -> None:
    """Refuse a plan with a packed module that AutoRound would leave in 16 bits."""
    for module in packed_modules(plan):
        reason = left_by_name(module) or _left_by_shape(module, original)
        if reason:
            what = f"is to be packed, and AutoRound leaves it in 16 bits: {reason}"
            raise GateRefused(module, what, f"name {module}{WEIGHT} in the model's tensors instead")


def packed_modules(plan: RequantizePlan) -> Iterator[str]:
    for pattern in (*plan.base_tensors, *plan.mtp_tensors):
        for name in expand(pattern):
            if name.endswith(_PACKED):
                yield name.removesuffix(_PACKED)


def left_by_name(module: str) -> str:
    """Return why AutoRound skips a module of this name, or an empty string."""
    if not _LAYERS.match(module):
        return "it is in no layer of the language model or of its drafter"
    return "it is a gate" if module.endswith(_GATES) else ""


def _left_by_shape(module: str, original: Checkpoint) -> str:
    matrix = find_weight(module, original)
    if matrix is None:
        return "the original holds no such weight"
    shape = matrix.shape
    if len(shape) != 2:
        return f"it is no matrix but {list(shape)}"
    rows, columns = shape
    if rows % _MULTIPLE:
        return f"its {rows} rows are no multiple of {_MULTIPLE}"
    return f"its {columns} columns are no multiple of {GROUP}" if columns % GROUP else ""


def requantize(plan: RequantizePlan, progress: Progress, copies: CopyPlan | None = None) -> bool:
    """Quantise the plan's tree, or copy it from a peer; return False when it was already there."""

    def write(work: Path, tree_dir: Path) -> None:
        if copies is not None and copy_from_peer(copies, plan, tree_dir, progress):
            return
        _write_tree(plan, work, tree_dir, progress)

    return make_checkpoint(plan, f"plan {plan.digest[:12]}", progress, write)


def _write_tree(plan: RequantizePlan, work: Path, tree_dir: Path, progress: Progress) -> None:
    fetch(plan.original, progress)
    progress.phase("gates")
    original = read_checkpoint(plan.original.out_dir)
    check_original(original)
    check_packable(plan, original)
    clear(work, keep=KEPT)
    made = quantise(plan, work, progress)
    tree_dir.mkdir()
    for name in files_of(made):
        # Links: a result that is refused is there to be looked at, and costs nothing twice.
        target = tree_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(made / name, target)
    result = read_checkpoint(tree_dir)
    check_quantised_names(str(tree_dir), result.owner.keys(), plan)
    _have_index(tree_dir, result.owner)
    _say_blocks(tree_dir, result.owner)
    report = {**read_json(work / DONE), **check_result(plan, original, result)}
    receipt = RequantizedReceipt(
        kind="requantized",
        digest=plan.digest,
        files=tuple(_hashed(tree_dir, progress)),
        tool_version=TOOL_VERSION,
        written_at=now(),
        plan=plan,
        tensors=len(result.owner),
        report=report,
    )
    write_receipt(tree_dir, receipt)


def _have_index(tree_dir: Path, owner: dict[str, str]) -> None:
    if (tree_dir / INDEX_NAME).exists():
        return
    total = sum((tree_dir / shard).stat().st_size for shard in set(owner.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owner.items()))}
    write_json(tree_dir / INDEX_NAME, index)


def _say_blocks(tree_dir: Path, owner: dict[str, str]) -> None:
    """Write the packed blocks into the configs.

    AutoRound lists drafter blocks only in the run that packs them; a resumed run omits them.
    """
    for name in (CONFIG_NAME, QUANTIZATION_NAME):
        path = tree_dir / name
        config = read_json(path) if path.exists() else {}
        quantization = config.get("quantization_config", config)
        if isinstance(quantization, dict) and "block_name_to_quantize" in quantization:
            set_blocks(quantization, owner)
            write_json(path, config)


def _hashed(tree_dir: Path, progress: Progress) -> list[ReceiptFile]:
    """Sync every file, make it writable by root only, and return it with its hash."""
    names = files_of(tree_dir)
    progress.phase("hash", sum((tree_dir / name).stat().st_size for name in names))

    def hash_and_sync(name: str) -> ReceiptFile:
        path = tree_dir / name
        path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)
        sha256 = hash_file(path, progress.add)
        return vouched(name, stamp_of(path), sha256)

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(hash_and_sync, names))
