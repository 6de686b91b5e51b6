"""Preflight names who else has the GPU, its memory or our port, and leaves alone who has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.preflight.surveyed import OLLAMA, one, problems, survey, warnings


@pytest.mark.parametrize(
    ("state", "restart"),
    [
        ("running", "no"),
        ("restarting", "on-failure"),
        ("running", "unless-stopped"),
        ("exited", "always"),
    ],
)
def test_an_engine_of_others_that_runs_or_comes_back_is_named(state: str, restart: str) -> None:
    container = OLLAMA.replace("STATE", state).replace("RESTART", restart)
    one(problems(survey(containers=[container])), "ollama", state, restart, "takeover")


@pytest.mark.parametrize("restart", ["no", "unless-stopped", "on-failure"])
def test_an_engine_that_stays_stopped_is_nobodys_business(restart: str) -> None:
    container = OLLAMA.replace("STATE", "exited").replace("RESTART", restart)
    assert problems(survey(containers=[container])) == []


@pytest.mark.parametrize(
    ("name", "ours"), [("spark-vllm", False), ("spark-main-0123456789ab", True)]
)
def test_a_strangers_engine_that_is_named_after_the_machine_is_a_strangers(
    name: str, ours: bool
) -> None:
    container = OLLAMA.replace("STATE", "running").replace("RESTART", "always")
    found = problems(survey(containers=[container.replace("/ollama", f"/{name}", 1)]))
    assert (found == []) is ours, found


@pytest.mark.parametrize(
    ("unit", "ours"),
    [("spark-vllm.service", False), ("spark-serve@main-0123456789ab.service", True)],
)
def test_so_is_a_unit(unit: str, ours: bool) -> None:
    held = problems(survey(processes=[f"77 62914560 /system.slice/{unit} python3"]))
    said = warnings(survey(processes=[f"77 62914560 /system.slice/{unit} python3"]))
    assert ([*held, *said] == []) is ours


def test_who_may_not_ask_docker_is_told_of_the_missing_right_alone() -> None:
    seen = survey(sudo=["no", "ann"], containers=["unreachable active"])
    one(problems(seen), "cannot become root")


def test_a_container_we_may_take_over_is_no_problem() -> None:
    container = OLLAMA.replace("STATE", "running").replace("RESTART", "always")
    assert problems(survey(containers=[container]), takeover=("ollama",)) == []


ON_GPU = (
    '{"id":"ID","name":"/images","image":"my/flux:1","state":"running","restart":"always",'
    '"runtime":"nvidia","requests":null,"labels":null,"visible":["all",null]}'
).replace("ID", "c0" * 32)


def test_a_container_that_may_stay_is_no_problem_nor_is_what_runs_in_it() -> None:
    seen = survey(
        containers=[ON_GPU],
        compute_apps=["77, python3"],
        compute_cgroups=[f"77 /system.slice/docker-{'c0' * 32}.scope"],
        processes=[f"77 2097152 /system.slice/docker-{'c0' * 32}.scope python3"],
    )
    assert any("container images" in line for line in problems(seen))
    assert problems(seen, allow_containers=("images",)) == []
    assert warnings(seen, allow_containers=("images",)) == []


def test_neighbours_without_the_gpu_are_nobodys_business_where_nvidia_is_the_default() -> None:
    qdrant = ON_GPU.replace("images", "qdrant").replace('"all",', "")
    assert problems(survey(containers=[qdrant])) == []


OURS = (
    '{"id":"ID","name":"/spark-main-0123456789ab","image":"spark-vllm:0123456789ab",'
    '"state":"running","restart":"no","runtime":"nvidia","requests":null,'
    '"labels":{"spark.release":"main-0123456789ab"}}'
).replace("ID", "a1" * 32)
SERVING: dict[str, Any] = {
    "containers": [OURS],
    "serving": ["spark-serve@main-0123456789ab.service"],
    "engine-memory": [f"spark-serve@main-0123456789ab.service {90 << 30}"],
    "meminfo": ["MemTotal: 125513944 kB", "MemAvailable: 9000000 kB"],
}
OUR_CGROUP = f"77 /system.slice/docker-{'a1' * 32}.scope"


# A process of the engine's may end between the question for it and that for its cgroup.
@pytest.mark.parametrize("cgroups", [[OUR_CGROUP], ["77 "], []])
def test_our_own_engine_is_no_stranger(cgroups: list[str]) -> None:
    seen = survey(**SERVING, compute_apps=["77, VLLM::EngineCore"], compute_cgroups=cgroups)
    assert problems(seen) == []


def test_a_stranger_on_the_gpu_beside_our_serving_engine_is_named() -> None:
    seen = survey(
        **SERVING,
        compute_apps=["77, VLLM::EngineCore", "78, /home/ann/venv/bin/python3"],
        compute_cgroups=[OUR_CGROUP, "78 /user.slice/user-1000.slice/session-3.scope"],
    )
    assert problems(seen) == []
    one(warnings(seen), "/home/ann/venv/bin/python3", "pid 78 uses the GPU")
    assert warnings(seen, allow_memory_holders=("python3",)) == []


@pytest.mark.parametrize(
    ("planned_gib", "fits"), [("90", True), ("82", True), ("80", False), ("", None)]
)
def test_memory_counts_what_the_stop_of_our_engine_frees(
    planned_gib: str, fits: bool | None
) -> None:
    """8.6 GiB are available and 90 GiB needed; a process of somebody else uses the GPU, too."""
    planned = str(int(planned_gib) << 30) if planned_gib else ""
    seen = survey(
        **{**SERVING, "engine-memory": [f"{SERVING['serving'][0]} {planned}"]},
        compute_apps=["78, python3"],
        compute_cgroups=["78 /user.slice/x"],
    )
    refused = [line.split(":")[0] for line in problems(seen)]
    warned = [line.split(":")[0] for line in warnings(seen)]
    assert refused == ([] if fits is not False else ["process python3", "memory"])
    memory_warning = ["memory"] if fits is None else []
    assert warned == (["process python3", *memory_warning] if fits is not False else [])


@pytest.mark.parametrize("resident", [[], ["9 2097152 /user.slice/x python3"]])
@pytest.mark.parametrize("fits", [True, False])
def test_a_process_on_the_gpu_is_refused_only_when_memory_does_not_suffice(
    resident: list[str], fits: bool
) -> None:
    available_kib = 120000000 if fits else 60000000
    seen = survey(
        compute_apps=["9, /opt/x/python3"],
        processes=resident,
        meminfo=["MemTotal: 125513944 kB", f"MemAvailable: {available_kib} kB"],
    )
    for allowed in ((), ("python3",)):
        refused = [one for one in problems(seen, allow_memory_holders=allowed) if "pid 9" in one]
        warned = [one for one in warnings(seen, allow_memory_holders=allowed) if "pid 9" in one]
        expected = 0 if allowed else 1
        assert (len(refused), len(warned)) == ((0, expected) if fits else (expected, 0))


def test_a_stranger_on_our_port_is_named_and_our_gateway_is_not() -> None:
    case = Path(__file__).parents[1] / "facts" / "HostSurvey" / "port_taken.yml"
    ports = yaml.safe_load(case.read_text())["sections"]
    seen = survey(listeners=ports["listeners"], listener_cgroups=ports["listener-cgroups"])
    assert problems(seen, ports=(8000,)) == []
    one(problems(seen, ports=(8001,)), "port 8001", "docker-proxy (pid 99)")
    one(problems(seen, ports=(8002,)), "a process")
    assert problems(seen, ports=(9000,)) == []


def test_two_services_do_not_swap_ports_in_one_deploy_which_neither_could_finish() -> None:
    ports = {
        "listeners": ['LISTEN 0 511 127.0.0.1:8001 0.0.0.0:* users:(("nginx",pid=9,fd=5))'],
        "listener_cgroups": ["9 /system.slice/spark-gateway@embed.service"],
    }
    seen = survey(**ports)
    swapped = {"main": (8000,), "embed": (8002,), "rank": (8001,)}
    said = problems(seen, ports=(8000, 8001, 8002), gateways=swapped)
    one(said, "port 8001", "the gateway of embed still listens")
    # Its own, or that of a service that is listed no more and ends before.
    as_before = {"main": (8000,), "embed": (8001,), "rank": (8002,)}
    assert problems(seen, ports=(8000, 8001, 8002), gateways=as_before) == []
    renamed = {"main": (8000,), "vectors": (8001,)}
    assert problems(seen, ports=(8000, 8001), gateways=renamed) == []
