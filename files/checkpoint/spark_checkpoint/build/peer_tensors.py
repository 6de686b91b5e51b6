import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from spark_contract.builder_api import BuildPlan, DonorUrl
from spark_contract.fetching import TransferOptions

from spark_checkpoint import storage, tensor_sets
from spark_checkpoint.build.new_tensors import TensorMaker
from spark_checkpoint.build.source_checks import (
    Sources,
    check_base_names,
    check_graftable,
    hash_tensors,
    read_sizes,
)
from spark_checkpoint.build.write import Changes, NewTensor, Staging
from spark_checkpoint.directory import Checkpoint
from spark_checkpoint.errors import ValidationError
from spark_checkpoint.headers import SIXTEEN_BIT, Tensor
from spark_checkpoint.number_formats import WORD_BITS, packed_tensors
from spark_checkpoint.progress import Progress
from spark_checkpoint.sources.donor import UrlDonor
from spark_checkpoint.sources.peers import BUILD_LOCALLY


def read_changes(
    transfer: TransferOptions,
    files_url: str,
    plan: BuildPlan,
    base: Checkpoint,
    config: Mapping[str, Any],
    work: Path,
    progress: Progress,
) -> tuple[Sources, Changes]:
    """Download a result's new tensors; names, dtypes and shapes must match the plan."""
    modules = tensor_sets.swapped_modules(plan)
    sources = Sources(base, None, modules, check_base_names(plan, base, modules))
    replaced = tensor_sets.replacement_names(plan)
    new = {old: names for old, names in replaced.items() if old in base.owner}
    grafted = [name for old in sources.mtp_missing for name in replaced.get(old, (old,))]
    all_new = [name for names in (*new.values(), grafted) for name in names]
    stored = {
        name: tensor_sets.overlay_name(name) if plan.layout == "overlay" else name
        for name in all_new
    }
    if not stored:
        return sources, Changes()
    donor = UrlDonor(
        DonorUrl(
            url=files_url,
            tries=transfer.tries,
            token_file=transfer.token_file,
            timeout_s=transfer.timeout_s,
        ),
        direct=True,
    )
    present = donor.names.intersection(stored.values())
    tensor_sets.check_same_names(files_url, "new tensors", present, stored.values())
    headers = donor.tensors(stored.values())
    entries = {name: headers[stored[name]] for name in stored}
    _check_entries(plan, sources, config, entries)
    size_bytes = sum(entry.size_bytes for entry in entries.values())
    storage.check_free_space(work, size_bytes, f"copying {plan.name}")
    directory = work / "peer-tensors"
    shutil.rmtree(directory, ignore_errors=True)
    staged = donor.stage(headers, directory, progress)
    spans = {name: staged[stored[name]] for name in stored}

    def new_tensor(name: str) -> NewTensor:
        return NewTensor(name, entries[name].dtype, entries[name].shape, spans[name])

    changes = Changes({old: [new_tensor(name) for name in names] for old, names in new.items()})
    if grafted:
        changes.added[""] = [new_tensor(name) for name in grafted]
    if plan.shared_experts == "fp8-donor":
        with closing(Staging(work / "new-tensors")) as stage:
            TensorMaker(
                base, modules, plan.block_shape, entries, spans, stage, progress, changes
            ).compare_with_donor()
    return sources, changes


def check_locked_tensors(
    where: str, plan: BuildPlan, sources: Sources, changes: Changes, receipt_sha256: str | None
) -> None:
    """Compare the FP8 tensors with the hash in the receipt, unless it also covers MTP tensors."""
    if plan.shared_experts != "fp8-donor" or sources.mtp_missing:
        return
    new = [
        tensor
        for module in sources.modules
        for tensor in changes.added[module + tensor_sets.WEIGHT]
    ]
    sha256 = hash_tensors(
        {tensor.name: tensor for tensor in new}, {tensor.name: tensor.span for tensor in new}
    )
    if sha256 != receipt_sha256:
        problem = f"sent FP8 tensors with sha256 {sha256}, but the receipt has {receipt_sha256}"
        raise ValidationError(where, problem, BUILD_LOCALLY)


def _check_entries(
    plan: BuildPlan, sources: Sources, config: Mapping[str, Any], entries: Mapping[str, Tensor]
) -> None:
    """Check dtypes and shapes of new tensors, from the headers of a peer's files."""
    base, grafted = sources.base, {}
    for old, names in tensor_sets.replacement_names(plan).items():
        module = old.removesuffix(tensor_sets.WEIGHT)
        if names == (module + tensor_sets.WEIGHT, module + tensor_sets.SCALE):
            weight, scale = (entries[name] for name in names)
            shape = base.tensor(old).shape
            tensor_sets.check_fp8_weight(f"peer {module}", shape, weight, scale, plan.block_shape)
            continue
        packed = entries[names[0]]
        bits = 4 if old.startswith(tensor_sets.MTP_PREFIX) else 8
        if len(packed.shape) != 2:
            raise ValidationError(f"peer {names[0]}", "is not a matrix", BUILD_LOCALLY)
        weight_shape = (packed.shape[1], packed.shape[0] * WORD_BITS // bits)
        shape = base.tensor(old).shape if old in base.owner else weight_shape
        expected = packed_tensors(shape, bits)
        for name, dtype_and_shape in zip(names, expected.values(), strict=True):
            if entries[name].dtype_and_shape != dtype_and_shape:
                problem = f"is {entries[name].dtype_and_shape}, expected {dtype_and_shape}"
                raise ValidationError(f"peer {name}", problem, BUILD_LOCALLY)
        grafted[old] = Tensor("BF16", weight_shape, 0, 0)
    for name in sources.mtp_missing:
        entry = grafted[name] = grafted.get(name) or entries[name]
        if entry.dtype not in SIXTEEN_BIT:
            problem = f"is {entry.dtype}, expected 16 bits"
            raise ValidationError(f"peer {name}", problem, BUILD_LOCALLY)
    check_graftable(sources.mtp_missing, grafted, read_sizes(base, config), plan.block_shape)
