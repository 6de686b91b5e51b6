"""``spark-deploy settings``: all settings with defaults and descriptions."""

import json

import click
import yaml

from spark_deploy.cli.options import Options, shared_options
from spark_deploy.config.checkout import CHECKOUT


@click.command
@shared_options(hosts=False)
def settings(options: Options) -> int:
    text = (CHECKOUT / "group_vars/all.yml").read_text("utf-8")
    print(json.dumps(yaml.safe_load(text), indent=1) if options.json else text.rstrip("\n"))
    return 0
