"""Profiles were served over HTTP with the arguments that they have today."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_deploy.checkout import CHECKOUT

SERVED = sorted((CHECKOUT / "proofs/results/gpu").glob("serve-*.json"))


def as_planned(found: dict[str, Any]) -> list[str]:
    """Return the arguments of a result without what it says that it changed."""
    argv: list[str] = found["argv"][1:]  # the first one is the tree
    for said in found["changed"]:
        first, _, rest = said.partition(" ")
        if first == "added":
            option, _, value = rest.partition(" ")
            place = max(at for at, one in enumerate(argv) if one == option)
            assert argv[place + 1] == value
            del argv[place : place + 2]
        elif first == "without":
            argv.append(rest.partition(",")[0])
        else:
            argv[argv.index(first.rstrip(":")) + 1] = rest.partition(" -> ")[0]
    return argv


@pytest.mark.slow
@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)
def test_a_profile_was_served_with_the_arguments_it_has(path: Path) -> None:
    """Who changes them serves the profile again, or takes its result away: `make gpu`."""
    name = path.stem.removeprefix("serve-").removesuffix("-pictures").removesuffix("-long")
    command = [sys.executable, "-m", "spark_deploy", "plan", "inventory/spark.py", "--estimate"]
    made = subprocess.run(
        [*command, "--json", "--profile", name], cwd=CHECKOUT, capture_output=True, check=True
    )
    engine = json.loads(made.stdout)[0]["serve"]["engine"]
    found = json.loads(path.read_text("utf-8"))
    assert sorted(as_planned(found)) == sorted(engine["argv"][1:])
    assert found["env"] == engine["env"]
