"""Runs AutoRound in the engine's container, block by block: what is done survives a kill."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from spark_contract import files
from spark_contract.serving.records import GpuProof
from spark_contract.work.orders import RequantizePlan
from spark_contract.work.patterns import expand

from spark_checkpoint.errors import GateRefused, TransferFailed
from spark_checkpoint.format.tree import read_json
from spark_checkpoint.progress import Progress
from spark_checkpoint.storage import refuse_without_room, write_json
from spark_checkpoint.verify.gates import MTP_PREFIX, WEIGHT

MADE, RESUME, ORDER, SCRIPT = "made", "resume", "order.json", "inside.py"
DONE = "done.json"  # written last: which folder of MADE is the tree, and with what it was made
_PACKED = ".qweight"
_POLL_S = 2.0
_STOP_S = 20


KEPT = frozenset({MADE, RESUME, DONE})  # of a work directory, by the next try


def quantise(plan: RequantizePlan, work: Path, progress: Progress) -> Path:
    """Have AutoRound's tree in ``work``, and return it; blocks that were done are kept."""
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
    """Wait for the container and tell which blocks are done."""
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
    again = "run `spark-deploy requantize` for this host"
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
    """Ask docker; a container that is not there is none to stop."""
    subprocess.run(("docker", *words), capture_output=True, check=False)
