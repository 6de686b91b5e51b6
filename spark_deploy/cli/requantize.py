"""``spark-deploy requantize MODEL --on HOST``: an INT4 tree of one's own."""

from __future__ import annotations

from spark_deploy.cli import run_pyinfra
from spark_deploy.cli.hosts import say
from spark_deploy.cli.options import Options


def run(options: Options) -> int:
    """Run the deploy with the model and the setting that asks for such a tree."""
    wanted = {"model": options.wanted, "limit": [*options.limit, *options.on], "requantized": True}
    code = run_pyinfra.run(Options(**{**vars(options), **wanted}))
    if code == 0 and not options.dry:
        say(
            "to serve what is made of it: set checkpoint.requantized: true beside model: "
            f"{options.wanted}, then spark-deploy up"
        )
    return code
