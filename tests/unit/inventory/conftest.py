import os
import subprocess
from pathlib import Path

import pytest

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SettingsError
from spark_deploy.inventory.plans import read_inventory
from tests import forked

INVENTORY = """
import sys as _sys
_sys.path.insert(0, {checkout!r})
from spark_deploy.inventory import group_from as _group_from
spark = _group_from("spark", hosts={hosts}, file=__file__)
"""


class Repository:
    def __init__(self, root: Path):
        self.root, self.inventory = root, root / "sparks.py"
        for folder in ("group_vars", "host_vars"):
            (root / folder).mkdir()
        self.list_hosts('["spark-1", "spark-2"]')

    def list_hosts(self, hosts: str) -> None:
        self.inventory.write_text(INVENTORY.format(checkout=str(CHECKOUT), hosts=hosts))

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def read(self) -> dict:
        return read_inventory(self.inventory)

    def error(self) -> str:
        with pytest.raises(SettingsError) as caught:
            self.read()
        return str(caught.value)

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return forked.run(words, cwd=cwd or self.root, env=environment)

    def pyinfra(self, *words: str, deploy: str = "debug-inventory"):
        return self.run("pyinfra", str(self.inventory), *words, deploy)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)
