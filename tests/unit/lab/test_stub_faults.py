"""The list of the stub engine's faults, which the fault tests run through, misses none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import stub_faults


def _source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "new.c").write_text(text)
    monkeypatch.setattr(stub_faults, "SOURCES", [*stub_faults.SOURCES, tmp_path / "new.c"])


def test_a_new_fault_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stub_faults.stub_faults()
    assert {"garbage", "crash-at-start", "plugin-missing"} <= set(before)
    _source(tmp_path, monkeypatch, 'if (config.tools && !fault("new-one")) return;')
    assert set(stub_faults.stub_faults()) - set(before) == {"new-one"}


def test_a_fault_asked_for_in_another_way_is_not_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _source(tmp_path, monkeypatch, "if (fault(other[i])) return;")
    with pytest.raises(ValueError, match="other"):
        stub_faults.stub_faults()
