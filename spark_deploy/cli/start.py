"""``spark-deploy start``: take back a stop; the last proven release serves again."""

from __future__ import annotations

import argparse

from spark_deploy.cli.stop import tell
from spark_deploy.planning.serving.gateway import SERVICE


def run(options: argparse.Namespace) -> int:
    """Start the service on the chosen hosts; 1 when one does not serve afterwards."""
    return tell(options, ["start-service", SERVICE])
