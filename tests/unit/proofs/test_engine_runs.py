"""The runner of engine cases: states, time limits and resuming."""

from pathlib import Path
from typing import Any

import pytest

from proofs.engine.run import run_cases
from proofs.recall import run as recall_run

MODULE = "tests.unit.proofs.engine_stub"


@pytest.fixture(autouse=True)
def single_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")


def cases(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "tree": "tiny", "options": {}} for name in names]


@pytest.mark.slow
def test_each_case_has_state_and_log(tmp_path: Path) -> None:
    wanted = cases("answers", "dies", "hangs")
    results = run_cases(wanted, tmp_path, tmp_path / "out", limit_s=5, module=MODULE)
    states = {name: result["state"] for name, result in results.items()}
    assert states == {"answers": "ran", "dies": "died", "hangs": "late"}
    assert results["answers"]["log_lines"] == [f"Using stub {tmp_path}/tiny 7"]


def test_finished_case_is_run_again_unless_resumed(tmp_path: Path) -> None:
    done = tmp_path / "answers.json"
    done.write_text('{"state": "before"}')
    assert run_cases(cases("answers"), tmp_path, tmp_path, module=MODULE, resume=True) == {}
    [again] = run_cases(cases("answers"), tmp_path, tmp_path, module=MODULE).values()
    assert again["state"] == "ran"


def test_recall_reads_finished_cases_and_reports_unfinished_cases(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"state": "ran"}')
    results = recall_run.run_cases(
        cases("one", "two"), tmp_path, tmp_path, at_once=1, limit_s=1, within_s=-1
    )
    assert [results[name]["state"] for name in ("one", "two")] == ["ran", "not run"]
