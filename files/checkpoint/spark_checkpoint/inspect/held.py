"""Holds base and donor of a plan against it by their headers, before their bytes are fetched."""

from __future__ import annotations

from pathlib import Path

from spark_contract.work.orders import BuildPlan, Held
from spark_contract.work.patterns import count

from spark_checkpoint.build.config import usable
from spark_checkpoint.build.gated import donor_tensors, gate
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
    donor = gated.donor
    if donor is not None:
        donor_tensors(plan, gated)  # asks for their headers: it has what is taken of it
    return Held(
        base_tensors=len(base.owner),
        donor_tensors=len(donor.names) if donor else 0,
        swapped_modules=len(gated.modules),
        mtp_tensors=sum(map(count, plan.mtp_tensors)),
        mtp_from_donor=len(gated.mtp_missing),
    )
