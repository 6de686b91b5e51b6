"""Preflight says what disk and memory lack, and which setting or which neighbour it is about."""

from __future__ import annotations

import json

import pytest

from tests.unit.preflight.surveyed import one, problems, survey, warnings


def test_memory_that_the_kernel_keeps_for_its_handover_is_not_available() -> None:
    kept = ["MemTotal: 125513944 kB", "MemAvailable: 120000000 kB", "CmaTotal: 0 kB"]
    without = survey(meminfo=[*kept, "CmaFree: 0 kB"]).memory.available_bytes
    assert survey(meminfo=[*kept, "CmaFree: 9000000 kB"]).memory.available_bytes == (
        without - 9000000 * 1024
    )


def test_a_process_that_holds_memory_is_named_when_memory_does_not_suffice() -> None:
    seen = survey(
        processes=["9 41943040 /user.slice/x llama-server"],
        meminfo=["MemTotal: 125513944 kB", "MemAvailable: 60000000 kB"],
    )
    found = problems(seen)
    assert "llama-server" in found[0]
    assert "40.0 GiB" in found[0]
    assert "57.2 GiB available" in found[1]


def test_too_little_memory_names_the_setting_with_which_the_engine_could_start() -> None:
    seen = survey(meminfo=["MemTotal: 125513944 kB", "MemAvailable: 96000000 kB"])
    needed = 97 << 30
    one(
        problems(seen, memory_needed_bytes=needed),
        "91.6 GiB available, the engine needs 97.0 GiB to start",
        "lower engine.memory_fraction to 0.74 for this host",
    )
    # What is named suffices: this share of the pool, and the engine's own margin.
    assert 0.74 * 1.02 * 125513944 <= 96000000 < 0.75 * 1.02 * 125513944


def test_a_smaller_pool_than_planned_names_the_setting_of_its_size() -> None:
    seen = survey(meminfo=["MemTotal: 119000000 kB", "MemAvailable: 115000000 kB"])
    fix = "set memory.total_gib to 113.4 for this host"
    one(problems(seen, memory_total_min_bytes=117 << 30), "113.5 GiB in total", fix)


def test_a_host_smaller_than_the_engine_is_told_to_choose_another_model_and_no_setting_alone() -> (
    None
):
    seen = survey(meminfo=["MemTotal: 24641536 kB", "MemAvailable: 23000000 kB"])
    found = problems(seen, memory_needed_bytes=97 << 30, memory_total_min_bytes=117 << 30)
    one(
        found,
        "23.5 GiB in total, the plan expects 117.0 GiB and the engine needs 97.0 GiB",
        "choose a smaller model or profile for this host",
        "`spark-deploy plan --data memory.total_gib=23.5` shows whether it fits",
    )


def test_a_process_that_holds_memory_is_a_warning_when_memory_suffices() -> None:
    seen = survey(processes=["9 2097152 /user.slice/x gnome-shell"])
    assert problems(seen) == []
    one(warnings(seen), "gnome-shell")
    assert warnings(seen, allow_memory_holders=("gnome-shell",)) == []


def test_disk_is_added_up_per_filesystem_with_what_pruning_frees() -> None:
    seen = survey(
        places=[
            "/srv/spark/models/x\t0\t/dev/a\t104857600\t/",
            "/var/lib/docker\t0\t/dev/a\t104857600\t/",
        ]
    )
    one(
        problems(seen),
        "disk /: 100.0 GiB free, 100.0 GiB to be written and 20.0 GiB kept free",
        "free 20.0 GiB",
        "`docker image prune -a` frees up to 11.5 GiB: it removes every image that no "
        "container uses, yours and those kept for rollback",
    )


def test_nobody_is_told_to_remove_containers_or_volumes_of_theirs() -> None:
    kinds = ("Images", "Containers", "Local Volumes", "Build Cache")
    seen = survey(
        places=[
            "/srv/spark/models/x\t0\t/dev/a\t1024\t/",
            "/var/lib/docker\t0\t/dev/a\t1024\t/",
        ],
        docker_df=[json.dumps({"Type": kind, "Reclaimable": "9.7GB (40%)"}) for kind in kinds],
    )
    [said] = problems(seen)
    assert "docker image prune -a" in said
    assert "docker builder prune -a" in said
    assert "system prune" not in said
    assert "container prune" not in said
    assert "volume" not in said


def test_bytes_already_in_place_are_not_asked_for_again() -> None:
    seen = survey(
        places=[
            "/srv/spark/models/x\t83886080\t/dev/a\t26214400\t/",
            "/var/lib/docker\t0\t/dev/b\t26214400\t/var/lib/docker",
        ],
        images=["spark-vllm:0123456789ab"],
    )
    assert problems(seen) == []


@pytest.mark.parametrize(("device", "fits"), [("7", True), ("8", False)])
def test_bytes_that_can_be_linked_need_no_room_and_those_of_another_disk_do(device, fits) -> None:
    seen = survey(
        places=[
            "/srv/spark/models/x\t0\t/dev/a\t26214400\t/",
            "/var/lib/docker\t0\t/dev/b\t26214400\t/var/lib/docker",
        ],
        images=["spark-vllm:0123456789ab"],
        stored=[
            "device\t/srv/spark/models/x\t7",
            f"file\t{device}\t{80 << 30}\t/home/ann/.cache/huggingface/hub/x/blobs/{'ab' * 32}",
        ],
    )
    found = problems(seen, downloads=(("/srv/spark/models/x", (("ab" * 32, 80 << 30),)),))
    assert found == [] if fits else "80.0 GiB to be written" in found[0]


def test_a_full_disk_stops_nobody_when_nothing_is_left_to_write() -> None:
    seen = survey(
        places=[
            "/srv/spark/models/x\t83886080\t/dev/a\t1024\t/",
            "/var/lib/docker\t0\t/dev/a\t1024\t/",
        ],
        images=["spark-vllm:0123456789ab"],
    )
    assert problems(seen) == []
