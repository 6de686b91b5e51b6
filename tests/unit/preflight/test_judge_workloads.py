"""Preflight reports other users of the GPU, of memory and of our ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.preflight.surveyed import Case, ollama, problems, survey, warnings

ON_GPU = (
    '{"id":"ID","name":"/images","image":"my/flux:1","state":"running","restart":"always",'
    '"runtime":"nvidia","requests":null,"labels":null,"visible":["all",null]}'
).replace("ID", "c0" * 32)
OURS = (
    '{"id":"ID","name":"/spark-main-0123456789ab","image":"spark-vllm:0123456789ab",'
    '"state":"running","restart":"no","runtime":"nvidia","requests":null,'
    '"labels":{"spark.release":"main-0123456789ab"}}'
).replace("ID", "a1" * 32)
SERVE_UNIT = "spark-serve@main-0123456789ab.service"
SERVING: dict[str, Any] = {
    "containers": [OURS],
    "serving": [SERVE_UNIT],
    "engine-memory": [f"{SERVE_UNIT} {90 << 30}"],
    "meminfo": ["MemTotal: 125513944 kB", "MemAvailable: 9000000 kB"],
}
OUR_CGROUP = f"77 /system.slice/docker-{'a1' * 32}.scope"
STRANGER = {
    "compute_apps": ["77, VLLM::EngineCore", "78, /home/ann/venv/bin/python3"],
    "compute_cgroups": [OUR_CGROUP, "78 /user.slice/user-1000.slice/session-3.scope"],
}
IN_CONTAINER = {
    "containers": [ON_GPU],
    "compute_apps": ["77, python3"],
    "compute_cgroups": [f"77 /system.slice/docker-{'c0' * 32}.scope"],
    "processes": [f"77 2097152 /system.slice/docker-{'c0' * 32}.scope python3"],
}
PORT_TAKEN = yaml.safe_load(
    (Path(__file__).parents[1] / "facts/HostSurvey/port_taken.yml").read_text()
)["sections"]
LISTENERS = {name: PORT_TAKEN[name] for name in ("listeners", "listener-cgroups")}
EMBED_LISTENS = {
    "listeners": ['LISTEN 0 511 127.0.0.1:8001 0.0.0.0:* users:(("nginx",pid=9,fd=5))'],
    "listener_cgroups": ["9 /system.slice/spark-gateway@embed.service"],
}


def gateways(**ports: int) -> dict[str, Any]:
    return {
        "ports": tuple(ports.values()),
        "gateways": {name: (port,) for name, port in ports.items()},
    }


def unit(name: str) -> dict[str, Any]:
    return {"processes": [f"77 62914560 /system.slice/{name} python3"]}


def engine(*cgroups: str) -> dict[str, Any]:
    apps = ["77, VLLM::EngineCore"]
    return {**SERVING, "compute_apps": apps, "compute_cgroups": list(cgroups)}


CASES = {
    **{
        f"engine container {state} {restart}": Case(
            {"containers": [ollama(state, restart)]}, [f"ollama|{state}|{restart}|takeover"]
        )
        for state, restart in (
            ("running", "no"), ("restarting", "on-failure"), ("running", "unless-stopped"),
            ("exited", "always"),
        )
    },
    **{
        f"engine container stopped {restart}": Case({"containers": [ollama("exited", restart)]})
        for restart in ("no", "unless-stopped", "on-failure")
    },
    "container named after the machine": Case(
        {"containers": [ollama(name="spark-vllm")]}, ["container spark-vllm"]
    ),
    "our container": Case({"containers": [ollama(name="spark-main-0123456789ab")]}),
    "container to take over": Case({"containers": [ollama()]}, needs={"takeover": ("ollama",)}),
    "unit named after the machine": Case(unit("spark-vllm.service"), [], ["process python3"]),
    "our unit": Case(unit(SERVE_UNIT), [], []),
    "docker without sudo": Case(
        {"sudo": ["no", "ann"], "containers": ["unreachable active"]}, ["cannot become root"]
    ),
    "allowed container": Case(IN_CONTAINER, [], [], {"allow_containers": ("images",)}),
    # NVIDIA's runtime is the default; the container requests no device.
    "container without the GPU": Case(
        {"containers": [ON_GPU.replace("images", "qdrant").replace('"all",', "")]}
    ),
    # A process of the engine may exit between the two queries.
    "our engine": Case(engine(OUR_CGROUP)),
    "our engine without cgroup": Case(engine("77 ")),
    "our engine has exited": Case(engine()),
    "process on the GPU": Case(
        {**SERVING, **STRANGER}, [], ["/home/ann/venv/bin/python3|pid 78 uses the GPU"]
    ),
    "allowed process on the GPU": Case(
        {**SERVING, **STRANGER}, [], [], {"allow_memory_holders": ("python3",)}
    ),
    "our gateway": Case(LISTENERS, needs={"ports": (8000,)}),
    "port taken": Case(LISTENERS, ["port 8001|docker-proxy (pid 99)"], needs={"ports": (8001,)}),
    "port of the kernel": Case(LISTENERS, ["port 8002|a process"], needs={"ports": (8002,)}),
    "port free": Case(LISTENERS, needs={"ports": (9000,)}),
    "services swap ports": Case(
        EMBED_LISTENS,
        ["port 8001|the gateway of embed still listens"],
        needs=gateways(main=8000, embed=8002, rank=8001),
    ),
    "ports as before": Case(EMBED_LISTENS, needs=gateways(main=8000, embed=8001, rank=8002)),
    "service no longer listed": Case(EMBED_LISTENS, needs=gateways(main=8000, vectors=8001)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_workload_is_a_problem_a_warning_or_neither(name: str) -> None:
    CASES[name].check()


def test_a_container_on_the_gpu_is_reported() -> None:
    assert any("container images" in line for line in problems(survey(**IN_CONTAINER)))


@pytest.mark.parametrize(
    ("planned_gib", "fits"), [("90", True), ("82", True), ("80", False), ("", None)]
)
def test_memory_counts_what_the_stop_of_our_engine_frees(
    planned_gib: str, fits: bool | None
) -> None:
    """8.6 GiB are available and 90 GiB needed; an unmanaged process uses the GPU, too."""
    planned = str(int(planned_gib) << 30) if planned_gib else ""
    apps = {"compute_apps": ["78, python3"], "compute_cgroups": ["78 /user.slice/x"]}
    sections = {**SERVING, **apps, "engine-memory": [f"{SERVE_UNIT} {planned}"]}
    if fits is False:
        Case(sections, ["process python3", "memory"], []).check()
    else:
        Case(sections, [], ["process python3", *(["memory"] if fits is None else [])]).check()


@pytest.mark.parametrize("resident", [[], ["9 2097152 /user.slice/x python3"]])
@pytest.mark.parametrize("fits", [True, False])
def test_a_process_on_the_gpu_is_refused_only_without_enough_memory(
    resident: list[str], fits: bool
) -> None:
    surveyed = survey(
        compute_apps=["9, /opt/x/python3"],
        processes=resident,
        meminfo=["MemTotal: 125513944 kB", f"MemAvailable: {120000000 if fits else 60000000} kB"],
    )
    for allowed in ((), ("python3",)):
        refused = [m for m in problems(surveyed, allow_memory_holders=allowed) if "pid 9" in m]
        warned = [m for m in warnings(surveyed, allow_memory_holders=allowed) if "pid 9" in m]
        expected = 0 if allowed else 1
        assert (len(refused), len(warned)) == ((0, expected) if fits else (expected, 0))
