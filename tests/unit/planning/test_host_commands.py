"""The commands that messages name can be typed on a host, by whoever is logged in."""

import re
import subprocess

import pytest
from spark_contract.paths import TOOLS_DIR

from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.plan.release import unit_files_of

COMMANDS = {file.path: file.content.decode() for file in unit_files_of(())}


@pytest.mark.parametrize(
    ("name", "user_id", "said"),
    [
        ("spark-check", 0, "tool check --deep a b"),
        ("spark-host", 0, "tool --deep a b"),
        ("spark-check", 1000, "sudo -- /usr/local/bin/spark-check --deep a b"),
        ("spark-host", 1000, "sudo -- /usr/local/bin/spark-host --deep a b"),
    ],
)
def test_a_command_runs_as_root_whoever_types_it(tmp_path, name, user_id, said):
    programs = {
        "id": f"echo {user_id}",
        "sudo": 'echo sudo "$@"',
        "tools/current/bin/spark-host": 'echo tool "$@"',
        name: COMMANDS[f"/usr/local/bin/{name}"].replace(TOOLS_DIR, f"{tmp_path}/tools"),
    }
    for path, text in programs.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        (tmp_path / path).chmod(0o755)

    typed = [tmp_path / name, "--deep", "a b"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(typed, capture_output=True, text=True, check=True, env=environment)

    assert done.stdout.strip() == said


def test_every_command_that_a_fix_names_is_one_of_them():
    there = {path.rpartition("/")[2] for path in COMMANDS}
    sources = [*CHECKOUT.glob("files/host/**/*.py"), *CHECKOUT.glob("spark_deploy/**/*.py")]
    named = set()
    for source in sources:
        named |= set(re.findall(r"`(spark-(?:host|check)\b)", source.read_text("utf-8")))
    assert named == {"spark-host", "spark-check"}
    assert named <= there
