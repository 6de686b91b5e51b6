"""A program of the host is asked with a limit, and its absence is no error."""

from __future__ import annotations

import pytest
from spark_serve import programs


def test_what_it_prints_comes_in_plain_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert programs.output_of("sh", "-c", 'echo " $LC_ALL "; echo second') == "C \nsecond"


@pytest.mark.parametrize("argv", [("no-such-program",), ("false",), ("sleep", "5")])
def test_absent_failed_and_hanging_programs_say_nothing(
    monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.setattr(programs, "_LIMIT_S", 0.3)
    assert programs.output_of(*argv) is None
