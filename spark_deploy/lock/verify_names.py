"""Hold the names of locked repositories against the catalog, before a host downloads them.

Headers are read by the checkpoint builder of this checkout, which reads them on hosts as well. It
runs beside this process: whatever a hub sends, no more than a line of it comes back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from spark_contract import documents, orders
from spark_contract.documents import DocumentError, plain, text_of
from spark_contract.errors import problem_in
from spark_contract.orders import BuildPlan, DonorUrl, Held

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import digest_of
from spark_deploy.config.errors import LockError
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock.hub_token import read_hub_token
from spark_deploy.lock.types import HeldNames, LockedSource

_UNANSWERED = 4  # the builder's exit code when reading or the network failed
# What decides nothing of the names: where things lie, and what is made of them.
_NOT_ASKED = ("digest", "recipe_version", "base", "donor", "layout", "out", "extra")


class HubSilent(LockError):  # noqa: N818 - named after what happened
    """The hub did not send the headers; nothing is known of the names."""


def question(order: BuildPlan, base: LockedSource, donor: LockedSource | None) -> HeldNames:
    """Return what a lock says of a build once its names are held; the counts are still open."""
    asked = {key: said for key, said in plain(order).items() if key not in _NOT_ASKED}
    places = [f"{one.repo}@{one.commit}" for one in (base, donor) if one is not None]
    return HeldNames(
        build=f"{order.name}, shared experts {order.shared_experts}, head {order.head}",
        question=digest_of({"builder": asked, "places": places}),
        base=places[0],
        donor=places[1] if donor is not None else None,
    )


def hold(asked: HeldNames, order: BuildPlan, hub: HubSettings) -> HeldNames:
    """Return ``asked`` with its counts.

    Raises:
        HubSilent: The hub did not send the headers.
        LockError: A build of these sources would be refused, after the download.
    """
    with workplace(hub) as builder:
        if isinstance(order.donor, DonorUrl):
            # Of the host's settings only the address is of use here.
            order = replace(
                order, donor=DonorUrl(url=order.donor.url, token_file=builder.token_file, tries=3)
            )
        (builder.folder / "plan.json").write_text(text_of(order), encoding="utf-8")
        said = builder.ask(orders.HOLD, "plan.json", asked.base)
    try:
        found = documents.parse(Held, said)
    except DocumentError as error:
        what, fix = (
            f"the builder's answer is malformed: {error}",
            "restore the checkout (git status)",
        )
        raise LockError.one(asked.base, what, fix) from error
    return replace(
        asked,
        base_tensors=found.base_tensors,
        donor_tensors=found.donor_tensors,
        swapped_modules=found.swapped_modules,
        mtp_tensors=found.mtp_tensors,
        mtp_from_donor=found.mtp_from_donor,
    )


@dataclass(frozen=True, slots=True)
class Builder:
    """The builder of this checkout, with a hub and the token for it."""

    folder: Path
    endpoint: str
    token_file: str | None

    def ask(self, *words: str) -> str:
        """Return what a command prints; it is told where the hub is, and no secret."""
        told = [orders.ENDPOINT, self.endpoint]
        told += [orders.TOKEN_FILE, self.token_file] if self.token_file else []
        homes = (str(CHECKOUT / "files" / home) for home in ("contract", "checkpoint"))
        # In an empty folder: no Python of the one that somebody works in is run.
        done = subprocess.run(
            [sys.executable, "-m", orders.BUILDER, *words, *told],
            cwd=self.folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(homes)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return done.stdout
        last = (done.stderr.strip().splitlines() or [""])[-1]
        problem = problem_in(last)
        if problem is None:
            what = f"the reader of its headers ended with {done.returncode} {last[:200]!r}"
            raise LockError.one(words[-1], what, "look whether this machine has memory left")
        raise (HubSilent if done.returncode == _UNANSWERED else LockError)([problem])


@contextmanager
def workplace(hub: HubSettings) -> Iterator[Builder]:
    """Have the builder at hand, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spark-names-") as folder:
        token_file, token = None, read_hub_token(hub)
        if token is not None:
            token_file = f"{folder}/token"
            private = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(private, "w", encoding="utf-8") as file:
                file.write(token)
        yield Builder(Path(folder), hub.endpoint, token_file)
