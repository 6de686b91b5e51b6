"""``spark-deploy manifest``: everything a deploy owns on each host."""

from __future__ import annotations

import argparse
import json

from spark_contract.documents import plain

from spark_deploy.cli.hosts import listed, planned
from spark_deploy.operations.service.manifest import manifest_of
from spark_deploy.payload.content import read_payload


def run(options: argparse.Namespace) -> int:
    """Print what is ours on the chosen hosts."""
    found = {host.name: manifest_of(planned(host), read_payload()) for host in listed(options)}
    if options.json:
        print(json.dumps(plain(found), indent=1))
        return 0
    for name, owned in found.items():
        print(name)
        for entry in owned:
            print(f"  {entry.kind:<10} {entry.name}")
    return 0
