"""The plan of an INT4 tree of our own: what AutoRound is told, and what it takes."""

from __future__ import annotations

from dataclasses import replace

from spark_contract.documents import plain
from spark_contract.host.paths import GPU_RECEIPT, QUANTISER
from spark_contract.work.orders import RequantizePlan

from spark_deploy.catalog.model import Architecture, HybridModel, Model
from spark_deploy.documents.digest import digest_of
from spark_deploy.errors import PlanError
from spark_deploy.lockfile.types import Lock
from spark_deploy.planning.budget.weights import weights_of
from spark_deploy.planning.types import ImagePlan, RequantizedPlan
from spark_deploy.planning.work.checkpoint import locked_source, source_plan
from spark_deploy.planning.work.jobs import fetch_order
from spark_deploy.settings.types import Settings

# Of one block while it is tuned: the weight, its rounded form, the values that are tuned, their
# gradients and the best of them so far, most in 32 bits. An estimate: no Spark has measured it.
_BYTES_PER_PARAMETER = 32
_RUNTIME_BYTES = 8 << 30
# 16 bits over 4 bits, with a 16-bit scale and a 4-bit zero for each 128 of them.
_OF_INT4 = 2 / (0.5 + 2 / 128 + 0.5 / 128)
_CALIBRATION = "/calibration.jsonl"  # until there is a job, in whose folder it lies


def requantized_plan(
    model: Model, settings: Settings, lock: Lock, image: ImagePlan, quantiser_digest: str
) -> RequantizedPlan | None:
    """Return the plan of the tree to quantise; ``None`` where the published one is wanted.

    Args:
        model: says by its exact sets of names what is packed and what stays in 16 bits.
        settings: of the host.
        lock: has the commit of the 16-bit repository.
        image: the engine's, in which AutoRound runs.
        quantiser_digest: of the list of pinned packages that AutoRound consists of.
    """
    if not settings.checkpoint.requantized:
        return None
    wanted = settings.requantize
    model, repository = _with_original(model)
    if wanted.iters and wanted.calibration is None:
        fix = "name a file in requantize.calibration, or set requantize.iters: 0"
        raise PlanError.one("requantize.calibration", "names no text to tune with", fix)
    original = source_plan(locked_source(lock, repository, model.sources.revision), settings)
    activations = wanted.nsamples * wanted.seqlen * model.architecture.hidden * 2
    size_bytes = weights_of(model.architecture).tree_bytes
    order = RequantizePlan(
        digest="0" * 64,
        name=model.name,
        original=fetch_order(original),
        base_tensors=model.tensors.base,
        mtp_tensors=model.tensors.mtp,
        layers=model.architecture.layers,
        image=image.tag,
        packages=QUANTISER,
        calibration=_CALIBRATION,
        gpu=GPU_RECEIPT,
        iters=wanted.iters,
        nsamples=wanted.nsamples,
        seqlen=wanted.seqlen,
        batch=wanted.batch,
        memory_bytes=_memory_bytes(model.architecture, activations),
        # The tree is linked into its place; beside it lies what the next block begins with.
        work_bytes=size_bytes + 2 * activations,
        out=f"{settings.paths.models_dir}/{model.name}-int4",
    )
    named = ("base_tensors", "mtp_tensors", "iters", "nsamples", "seqlen", "batch")
    digest = digest_of(
        {
            "original": original.digest,
            "image": image.base,
            "quantiser": quantiser_digest,
            "calibration": digest_of(wanted.calibration),
            "order": {key: said for key, said in plain(order).items() if key in named},
        }
    )
    order = replace(order, digest=digest, out=f"{order.out}-{digest[:12]}")
    return RequantizedPlan(order, original, wanted.calibration or "", size_bytes)


def original_bytes(model: Architecture) -> int:
    """Return the bytes of ``model`` as it is published in 16 bits, where nobody read its files."""
    weights = weights_of(replace(model, mtp_scheme="bf16"))
    packed = weights.experts_bytes + weights.attention_bytes
    return weights.tree_bytes - packed + round(packed * _OF_INT4)


def _with_original(model: Model) -> tuple[HybridModel, str]:
    if isinstance(model, HybridModel) and model.sources.original is not None:
        return model, model.sources.original
    raise PlanError.one(
        f"model {model.name}: checkpoint.requantized",
        "this model names no 16-bit repository",
        "name one in its sources.original, or set checkpoint.requantized: false",
    )


def _memory_bytes(model: Architecture, activations: int) -> int:
    """Return what one block takes while it is tuned, with the activations before and after it."""
    block = 3 * model.hidden * (model.experts * model.expert_width + model.shared_expert_width)
    return block * _BYTES_PER_PARAMETER + 4 * activations + _RUNTIME_BYTES
