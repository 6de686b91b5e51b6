"""``spark-deploy completion``: what a shell reads to complete the commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from spark_deploy.cli.options import Options


def run(options: Options) -> int:
    """Print the script of one shell; it asks this program for what may come next."""
    made_by = get_completion_class(options.shell)
    assert made_by is not None, "the table offers the shells that click knows"
    script = made_by(click.Command("spark-deploy"), {}, "spark-deploy", "_SPARK_DEPLOY_COMPLETE")
    print(script.source())
    return 0
