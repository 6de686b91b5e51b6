"""The scripts that look at hosts, run for real."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyinfra.api.exceptions import FactProcessError

from spark_deploy.hosts import facts
from tests.unit.shell import install_stub, run_script


def test_two_sides_of_a_script_run_at_once_and_are_told_one_after_the_other() -> None:
    began = time.monotonic()
    lines = run_script(
        facts.build_script(
            "echo '== a'; sleep 0.5; echo 1", parallel=("echo '== b'; sleep 0.5; echo 2",)
        )
    )
    assert lines == ["== a", "1", "== b", "2", "== end"]
    assert time.monotonic() - began < 0.9


@pytest.mark.parametrize(("one", "other"), [("kill $$", "echo '== b'"), ("echo '== a'", "exit 1")])
def test_a_side_that_does_not_come_to_its_end_makes_the_answer_one_that_was_cut_off(
    one: str, other: str
) -> None:
    script = facts.build_script(f"sh -c '{one}' || exit 1", parallel=(other,))
    with pytest.raises(FactProcessError, match="cut off"):
        facts.parse_sections(run_script(script))


@pytest.mark.parametrize(
    ("sudo", "told"),
    [
        ('shift 2; exec "$@"', ["yes", "asked"]),
        ("exit 1", ["no", "ann", "asked"]),
        ('[ "$3" = true ]', []),  # it works, and what it ran was killed
    ],
)
def test_a_script_says_whether_sudo_works_and_never_runs_twice(
    sudo: str, told: list[str], tmp_path: Path
) -> None:
    user = '[ "$1" = -un ] && echo ann || echo 1000'
    for name, text in (("sudo", sudo), ("id", user)):
        install_stub(tmp_path, name, text)
    assert run_script(facts.as_root("echo asked"), tmp_path) == ["== sudo", *told]
