"""A host on which every step of a change succeeds until a test says otherwise."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from spark_contract import files
from spark_host.engine import memory, serve
from spark_host.gateway import gateway, traffic
from spark_host.rollout import rollout
from spark_host.system import docker, systemd
from stub_host import Host

A, B = (f"main-{digit * 12}" for digit in "ab")


class Systemd:
    """Links and units as systemctl would leave them; one command can be made to fail."""

    def __init__(self, host: Host):
        self.wants = host.paths.units / "multi-user.target.wants"
        self.wants.mkdir(parents=True)
        self.active: set[str] = set()
        self.failing: tuple[str, ...] = ()

    def systemctl(self, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        if words == self.failing:
            return subprocess.CompletedProcess(words, 1, "", "Read-only file system")
        verb, unit = words[0], words[-1]
        if verb == "enable":
            (self.wants / unit).touch()
        elif verb == "disable":
            (self.wants / unit).unlink(missing_ok=True)
        elif verb == "stop":
            self.active.discard(unit)
        return subprocess.CompletedProcess(words, 0, "", "")

    def show(self, units: list[str], fields: list[str]) -> dict[str, systemd.UnitState]:
        return {unit: {"Id": unit, "ActiveState": self._state(unit)} for unit in units}

    def _state(self, unit: str) -> str:
        return "active" if unit in self.active else "inactive"


def ready_to_change(host: Host, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    """Put the steps of a change that need a real host out of the way."""
    made = Systemd(host)
    monkeypatch.setattr(systemd, "systemctl", made.systemctl)
    monkeypatch.setattr(systemd, "show", made.show)
    monkeypatch.setattr(systemd, "listed", lambda pattern: sorted(made.active))
    monkeypatch.setattr(systemd, "journal", lambda *words, **more: [])
    monkeypatch.setattr(docker, "engine_containers", list)
    for module, name in (
        (serve, "part_problem"), (docker, "gpu_problem"), (gateway, "problem"),
        (memory, "problem"), (memory, "wait_for_memory"), (gateway, "bring_up"),
        (gateway, "wait_until_listening"), (traffic, "open_for"), (rollout, "_full_check"),
        (rollout, "_drain"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(rollout, "_covered", lambda release, paths: False)
    monkeypatch.setattr(rollout, "_start", lambda release, *_: made.active.add(release.serve_unit))
    return made


def changed_to(host: Host, name: str) -> dict[str, Any]:
    rollout.switch(name, host.paths)
    return files.read_json(host.paths.switch(name)) or {}
