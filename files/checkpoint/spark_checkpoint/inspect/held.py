"""Holds base and donor of a plan against it by their headers, before their bytes are fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from spark_contract.work.orders import BuildPlan, Held, HeldSource
from spark_contract.work.patterns import count

from spark_checkpoint.build.config import usable
from spark_checkpoint.build.gated import donor_tensors, gate
from spark_checkpoint.format.header import Tensor
from spark_checkpoint.format.tree import CONFIG_NAME, natural_order, tree_of
from spark_checkpoint.inspect.inspection import Subject


def hold(subject: Subject, plan: BuildPlan) -> Held:
    """Pass a subject through the gates that a build has for its base, and the donor with it.

    Raises:
        GateRefused: A build would refuse them for the same reason, after the download.
    """
    usable(subject.config, f"{subject.place}: {CONFIG_NAME}", plan.head)
    shards = {name: subject.shards[name] for name in sorted(subject.shards, key=natural_order)}
    base = tree_of(Path(subject.place), shards, subject.index)
    gated = gate(plan, base, subject.config)
    donor, received_bytes = None, subject.received_bytes
    if gated.donor is not None:
        taken = donor_tensors(plan, gated)
        donor = HeldSource(len(gated.donor.names), _digest(taken.items()))
        received_bytes += gated.donor.received_bytes
    return Held(
        base=HeldSource(len(base.owner), _digest((name, base.tensor(name)) for name in base.owner)),
        donor=donor,
        swapped_modules=len(gated.modules),
        mtp_tensors=sum(map(count, plan.mtp_tensors)),
        mtp_from_donor=len(gated.mtp_missing),
        received_bytes=received_bytes,
    )


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    return hasher.hexdigest()
