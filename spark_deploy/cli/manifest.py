"""``spark-deploy manifest``: everything a deploy owns on each host."""

from __future__ import annotations

import argparse

from spark_deploy.cli.hosts import answer, listed, planned
from spark_deploy.operations.service.manifest import manifest_of
from spark_deploy.payload.content import read_payload


def run(options: argparse.Namespace) -> int:
    """Print what is ours on the chosen hosts."""
    found = {host.name: manifest_of(planned(host), read_payload()) for host in listed(options)}
    texts = (
        [name, *(f"  {entry.kind:<10} {entry.name}" for entry in owned)]
        for name, owned in found.items()
    )
    answer(options, found, texts, between="\n")
    return 0
