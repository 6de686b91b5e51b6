"""Preflight reports missing disk space and memory, and the setting that helps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.preflight.surveyed import Case, problems, survey

TOTAL = "MemTotal: 125513944 kB"
IMAGE = {"images": ["spark-vllm:0123456789ab"]}


def memory(available_kib: int, total: str = TOTAL, **more: Any) -> dict[str, Any]:
    return {"meminfo": [total, f"MemAvailable: {available_kib} kB"], **more}


def places(
    present_kib: int, available_kib: int, docker: str = "/dev/b", **more: Any
) -> dict[str, Any]:
    mount = "/" if docker == "/dev/a" else "/var/lib/docker"
    return {
        "places": [
            f"/srv/spark/models/x\t{present_kib}\t/dev/a\t{available_kib}\t/",
            f"/var/lib/docker\t0\t{docker}\t{available_kib}\t{mount}",
        ],
        **more,
    }


def small(total_gib: int, needed_gib: int = 90) -> dict[str, Any]:
    return {"memory_total_min_bytes": total_gib << 30, "memory_needed_bytes": needed_gib << 30}


CASES = {
    "a process uses the memory": Case(
        memory(60000000, processes=["9 41943040 /user.slice/x llama-server"]),
        ["process llama-server|40.0 GiB", "memory|57.2 GiB available"],
    ),
    # The reported share suffices with the engine's own margin:
    # 0.74 * 1.02 * 125513944 <= 96000000 < 0.75 * 1.02 * 125513944
    "too little memory": Case(
        memory(96000000),
        ["memory|91.6 GiB available|needs 97.0 GiB|lower engine.memory_fraction to 0.74"],
        needs=small(110, 97),
    ),
    "smaller pool than planned": Case(
        memory(115000000, "MemTotal: 119000000 kB"),
        ["memory|113.5 GiB in total|set memory.total_gib to 113.4"],
        needs=small(117),
    ),
    "host smaller than the engine": Case(
        memory(23000000, "MemTotal: 24641536 kB"),
        [
            "23.5 GiB in total, the plan expects 117.0 GiB|needs 97.0 GiB|smaller model or profile"
            "|`spark-deploy plan --data memory.total_gib=23.5`"
        ],
        needs=small(117, 97),
    ),
    "a process, and enough memory": Case(
        {"processes": ["9 2097152 /user.slice/x gnome-shell"]}, [], ["process gnome-shell"]
    ),
    "an allowed process": Case(
        {"processes": ["9 2097152 /user.slice/x gnome-shell"]},
        [],
        [],
        {"allow_memory_holders": ("gnome-shell",)},
    ),
    "two places on a filesystem": Case(
        places(0, 104857600, "/dev/a"),
        [
            "disk /: 100.0 GiB free, 100.0 GiB to be written and 20.0 GiB kept free|free 20.0 GiB"
            "|`docker image prune -a` frees up to 11.5 GiB: it removes every image that no "
            "container uses, yours and those kept for rollback"
        ],
    ),
    "bytes in place": Case(places(83886080, 26214400, **IMAGE)),
    "full disk, nothing to write": Case(places(83886080, 1024, "/dev/a", **IMAGE)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_lack_is_a_problem_with_its_fix(name: str) -> None:
    CASES[name].check()


def test_memory_kept_for_a_kexec_handover_is_not_available() -> None:
    kept = [TOTAL, "MemAvailable: 120000000 kB", "CmaTotal: 0 kB"]
    without, with_handover = (
        survey(meminfo=[*kept, f"CmaFree: {kib} kB"]).memory.available_bytes for kib in (0, 9000000)
    )
    assert with_handover == without - 9000000 * 1024


def test_no_fix_removes_containers_or_volumes() -> None:
    kinds = ("Images", "Containers", "Local Volumes", "Build Cache")
    rows = [json.dumps({"Type": kind, "Reclaimable": "9.7GB (40%)"}) for kind in kinds]
    [problem] = problems(survey(**places(0, 1024, "/dev/a", docker_df=rows)))
    assert "docker image prune -a" in problem
    assert "docker builder prune -a" in problem
    for other in ("system prune", "container prune", "volume"):
        assert other not in problem


@pytest.mark.parametrize(("device", "expected"), [("7", []), ("8", ["80.0 GiB to be written"])])
def test_only_files_that_can_be_linked_need_no_room(device: str, expected: list[str]) -> None:
    stored = [
        "device\t/srv/spark/models/x\t7",
        f"file\t{device}\t{80 << 30}\t/home/ann/.cache/huggingface/hub/x/blobs/{'ab' * 32}",
    ]
    needs = {"downloads": (("/srv/spark/models/x", (("ab" * 32, 80 << 30),)),)}
    Case(places(0, 26214400, stored=stored, **IMAGE), expected, None, needs).check()
