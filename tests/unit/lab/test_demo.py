"""The demo prints requirements first, and needs only Python until then."""

import subprocess
import sys

from lab import room
from spark_deploy.cli.hosts import Target, build_plan
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.settings.load import load_hosts
from tests.labkit import CHECKOUT


def test_lab_commands_import_only_the_standard_library():
    program = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); import lab.cli, lab.hub.server"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


def test_demo_requires_the_memory_planned_for_the_engine():
    settings = load_hosts({"lab": ["lab-1"]}, root=CHECKOUT)["lab-1"]
    plan = build_plan(Target("lab-1", {}, settings, read_catalog()), estimate=True)
    needed = plan.preflight.memory_needed_bytes
    assert needed <= room.ENGINE_MEMORY_BYTES < needed + (1 << 28)
