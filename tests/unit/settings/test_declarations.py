import shutil
import subprocess
import sys

import pytest
import yaml

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.documents import convert, to_yaml_data
from spark_deploy.config.settings.types import COMMAND_FLAGS, Settings

PARTS = (
    "spark_deploy", "files/contract", "files/host", "files/image", "files/checkpoint",
    "docs", "group_vars", "schema",
    "catalog", "proofs", "tools", "tests", "lab", "reports",
)  # fmt: skip
# The same for an engine argument, used by a profile.
ARGUMENTS = "spark_deploy/config/settings/engine.py"
MADE_UP_ARGUMENT = '    naps: int | None = Field(default=None, ge=1)\n    """Naps."""\n'
MADE_UP_OPTION = '    ("limits", "naps"): Option("max-naps"),\n'
USE_ARGUMENT = """
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.cli.recipes import read_arguments
from spark_deploy.plan.memory import plan_memory
from spark_deploy.plan.engine_arguments import engine_arguments
from spark_deploy.config.settings.engine import option_problems
from spark_deploy.config.settings.types import Settings
catalog = read_catalog()
model, settings = catalog.model("qwen3.5-122b"), Settings()
for name in ("v2", "base"):
    profile = catalog.profile(name, model.name)
    argv = engine_arguments(model, profile, plan_memory(model, profile, settings), ())
    print(argv[argv.index("--max-naps") + 1] if "--max-naps" in argv else "missing")
print(*option_problems({"max_naps": 4}))
for naps in ("5", "0"):
    taken = read_arguments(["--max-naps", naps])
    print(taken.profile, taken.unused)
"""


@pytest.fixture
def checkout(tmp_path):
    copy = tmp_path / "checkout"
    for part in PARTS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / part, copy / part, ignore=ignore)
    return copy


def run(checkout, *words):
    path = f"{checkout}:{checkout / 'files/contract'}"
    done = subprocess.run(
        [sys.executable, *words],
        cwd=checkout, env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(checkout):
    files = (path for path in checkout.rglob("*") if path.is_file())
    return {path.relative_to(checkout).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
def test_new_engine_argument_needs_only_one_declaration(checkout):
    declaration, profile = checkout / ARGUMENTS, checkout / "catalog/profiles/v2.yml"
    before = declaration.read_text("utf-8")
    line = next(line for line in before.splitlines(True) if "    max_batched_tokens" in line)
    option = next(line for line in before.splitlines(True) if '("kv_cache", "dtype")' in line)
    declaration.write_text(
        before.replace(line, MADE_UP_ARGUMENT + line).replace(option, MADE_UP_OPTION + option)
    )
    profile.write_text(profile.read_text("utf-8").replace("\nlimits:\n", "\nlimits:\n  naps: 3\n"))

    was = contents(checkout)
    run(checkout, "tools/docs/generate.py")
    now = contents(checkout)

    assert {name for name in now if now[name] != was.get(name)} == {"schema/profile.schema.json"}
    output, silent, refusal, taken, left = run(checkout, "-c", USE_ARGUMENT).splitlines()
    assert (output, silent) == ("3", "missing")
    assert "set elsewhere', 'set limits.naps in your own profile'" in refusal
    assert taken == "{'limits': {'naps': 5}} []"
    assert left == "{} ['--max-naps 0: not a valid value in a profile']"


def test_all_yml_contains_every_default_setting():
    data = yaml.safe_load((CHECKOUT / "group_vars/all.yml").read_text("utf-8"))
    expected = to_yaml_data(Settings())
    for group, key in (flag.split(".") for flag in COMMAND_FLAGS):
        del expected[group][key]
        if not expected[group]:
            del expected[group]
    assert data == expected
    assert convert(Settings, data) == Settings()
