"""Preflight reports every reason against a host, with a fix, and nothing else."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.memory import BUDDYINFO
from spark_deploy.config.settings.host import ExpectSettings
from spark_deploy.hosts import disk
from spark_deploy.hosts.preflight import judge, same_host_key
from tests.unit.operations.test_operations import NEEDS
from tests.unit.preflight.surveyed import Case, ollama, problems, survey

RULES: list[tuple[Any, int, int]] = [("require", 1, 0), ("warn", 0, 1), ("ignore", 0, 0)]
NO_DRIVER = {"capture": "nvidia-smi--no-driver--01.txt"}
MISMATCH = {"capture": "nvidia-smi--driver-library-mismatch--01.txt"}
ROOT = "root/root/755//"
POOL = ["MemTotal: 127601228 kB", "MemAvailable: 120639488 kB"]


def kernel(release: str, parameters: str) -> dict[str, Any]:
    return {"uname": ["aarch64", release], "kernels": [release], "kernel_parameters": [parameters]}


def fragmented(name: str) -> dict[str, Any]:
    return {"buddyinfo": ["4096", *(BUDDYINFO / f"{name}.txt").read_text().splitlines()]}


def writable(line: str, words: str) -> Case:
    return Case({"parents": [ROOT, line]}, [f"/data: |{words}|chown root: /data"])


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


ON_GPU = (
    '{"id":"ID","name":"/images","image":"my/flux:1","state":"running","restart":"always",'
    '"runtime":"nvidia","requests":null,"labels":null,"visible":["all",null]}'
).replace("ID", "c0" * 32)
OUR_CONTAINER = (
    '{"id":"ID","name":"/spark-main-0123456789ab","image":"spark-vllm:0123456789ab",'
    '"state":"running","restart":"no","runtime":"nvidia","requests":null,'
    '"labels":{"spark.release":"main-0123456789ab"}}'
).replace("ID", "a1" * 32)
SERVE_UNIT = "spark-serve@main-0123456789ab.service"
SERVING: dict[str, Any] = {
    "containers": [OUR_CONTAINER],
    "serving": [SERVE_UNIT],
    "engine-memory": [f"{SERVE_UNIT} {90 << 30}"],
    "meminfo": ["MemTotal: 125513944 kB", "MemAvailable: 9000000 kB"],
}
OUR_CGROUP = f"77 /system.slice/docker-{'a1' * 32}.scope"
UNMANAGED_PROCESS = {
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
    "factory Spark": Case({}, [], []),
    # Other users must not be able to replace models.
    "owned by a user": writable("ann/ann/755//data", "belongs to ann"),
    "owned by an unknown user": writable("1007/1007/755//data", "belongs to 1007"),
    "world-writable": writable("root/root/777//data", "by everybody"),
    "group-writable": writable("root/users/2775//data", "by group users"),
    "root only": Case({"parents": [ROOT, "root/root/755//srv"]}),
    "sticky": Case({"parents": [ROOT, "root/root/1777//tmp"]}),
    "group root": Case({"parents": [ROOT, "root/root/775//srv"]}),
    "other group without write access": Case({"parents": [ROOT, "root/staff/755//a"]}),
    # Identity; a wrong architecture or board hides later checks.
    "architecture": Case(
        {"uname": ["x86_64", "6.1"], "smi": [], "pci": []},
        ["architecture|x86_64, expected aarch64"],
    ),
    "board": Case({"pci": ["10de:2e03"], "smi": []}, ["PCI|no device 10de:2e12|10de:2e03"]),
    "no nvidia-smi": Case({"smi": []}, ["driver|not installed|never installs"]),
    "no driver": Case({"smi": [NO_DRIVER, "rc=9"]}, ["driver|couldn't communicate|reboot"]),
    "mismatch": Case({"smi": [MISMATCH, "rc=18"]}, ["driver|version mismatch|reboot"]),
    "no devices": Case({"smi": ["No devices were found", "rc=6"]}, ["driver|power-cycle"]),
    "smi crashes": Case({"smi": ["Segmentation fault", "rc=139"]}, ["driver|Segmentation|dmesg"]),
    "old driver": Case(
        {"smi": ["NVIDIA GB10, 575.99.01", "rc=0"], "module": []},
        ["driver|575.99.01 is older than 580"],
    ),
    "other module": Case({"smi": ["NVIDIA GB10, 580.159.03", "rc=0"]}, ["580.142|580.159.03"]),
    "two driver branches": Case(
        {"driver_packages": ["ii  nvidia-driver-580-open 580.1", "ii  nvidia-driver-590 590.4"]},
        ["driver|several branches|580, 590"],
    ),
    "operating system": Case(
        {"os_release": ["ID=ubuntu", 'VERSION_ID="26.04"']}, ["expected ubuntu 24.04"]
    ),
    # Health
    "sudo": Case({"sudo": ["no", "ann"]}, ["sudo|ann cannot become root|bootstrap"]),
    # As Sparks are delivered.
    **{
        f"half-installed {name}": Case(
            {"dpkg_audit": ["bad:", f" {name}  something", " language-pack-de  x"]},
            [f"half installed: {name}\n|dpkg --configure -a"],
        )
        for name in ("docker.io", "libnvidia-compute-580", "linux-image-6.17", "libc6")
    },
    "half-installed language": Case(
        {"dpkg_audit": ["not configured:", " language-pack-gnome-de-base  translations"]},
        [],
        ["packages|language-pack-gnome-de-base"],
    ),
    "memory of a kexec handover": Case(
        {"meminfo": [*POOL, "CmaTotal: 0 kB", "CmaFree: 9748480 kB"]},
        [],
        ["kernel|9.3 GiB|kho=off"],
    ),
    "CMA": Case({"meminfo": [*POOL, "CmaTotal: 131072 kB", "CmaFree: 118784 kB"]}, [], []),
    "faulty kernel": Case(
        kernel("7.0.0-1019-nvidia", "quiet"), [], ["kernel|7.0.0-1019-nvidia|kho=off"]
    ),
    "faulty kernel with parameter": Case(kernel("7.0.0-1019-nvidia", "quiet kho=off"), [], []),
    "newer kernel": Case(kernel("6.17.0-1032-nvidia", "quiet"), [], []),
    "blocks healthy": Case(fragmented("healthy"), [], []),
    "blocks fragmented": Case(fragmented("fragmented"), [], ["memory: fragmented"]),
    "blocks low": Case(fragmented("low"), [], []),
    "docker down": Case({"containers": ["unreachable failed"]}, [], ["docker|unit is failed"]),
    "docker silent": Case({"containers": ["unreachable active"]}, ["docker|does not answer"]),
    "pending reboot": Case({"reboot": ["required", "libc6"]}, [], ["reboot|libc6"]),
    "smaller pool": Case(
        {}, ["memory|119.7 GiB in total"], needs={"memory_total_min_bytes": 200 << 30}
    ),
    "no tailscale, not needed": Case({"tailscale": ["sh: 1: tailscale: not found"]}),
    "no tailscale": Case(
        {"tailscale": ["sh: 1: tailscale: not found"]},
        ["tailscale|not found|`tailscale up`"],
        needs={"tailscale": True},
    ),
    "tailscale stopped": Case(
        {"tailscale": ["no current Tailscale IPs; state: Stopped"]},
        ["tailscale|state: Stopped|serve.expose"],
        needs={"tailscale": True},
    ),
    "tailscale": Case({"tailscale": ["100.101.102.103"]}, needs={"tailscale": True}),
    # Room on disk and in memory.
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
    # Other users of the GPU, of memory and of our ports.
    **{
        f"engine container {state} {restart}": Case(
            {"containers": [ollama(state, restart)]}, [f"ollama|{state}|{restart}|takeover"]
        )
        for state, restart in (
            ("running", "no"),
            ("restarting", "on-failure"),
            ("running", "unless-stopped"),
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
    "container on the GPU": Case(IN_CONTAINER, ["container images"]),
    # NVIDIA's runtime is the default; the container requests no device.
    "container without the GPU": Case(
        {"containers": [ON_GPU.replace("images", "qdrant").replace('"all",', "")]}
    ),
    # A process of the engine may exit between the two queries.
    "our engine": Case(engine(OUR_CGROUP)),
    "our engine without cgroup": Case(engine("77 ")),
    "our engine has exited": Case(engine()),
    "process on the GPU": Case(
        {**SERVING, **UNMANAGED_PROCESS}, [], ["/home/ann/venv/bin/python3|pid 78 uses the GPU"]
    ),
    "allowed process on the GPU": Case(
        {**SERVING, **UNMANAGED_PROCESS}, [], [], {"allow_memory_holders": ("python3",)}
    ),
    "process on the GPU and in memory": Case(
        memory(60000000, compute_apps=["9, /x/python3"], processes=["9 2097152 /user.slice/x y"]),
        ["process y|pid 9 uses 2.0 GiB and the GPU", "memory|57.2 GiB available"],
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
}


@pytest.mark.parametrize("name", CASES)
def test_condition_gives_the_expected_problems_and_warnings(name):
    CASES[name].check()


@pytest.mark.parametrize(("rule", "refused", "warned"), RULES)
def test_plain_ubuntu_is_judged_by_the_rule(rule, refused, warned):
    needs = {"expect": ExpectSettings(dgx_os=rule)}
    Case({"dgx_release": []}, ["DGX OS"] * refused, ["DGX OS"] * warned, needs).check()


@pytest.mark.parametrize(("rule", "refused", "warned"), RULES)
@pytest.mark.parametrize("score", ["1", "2.6", "6", "0", "0.0", '"?"'])
def test_an_incomplete_vendor_update_is_judged_by_the_rule(rule, refused, warned, score):
    sections = {"torn": [f'{{"name": "OTA2.2", "torn": {score}}}']}
    words, needs = f"torn score {score} against OTA2.2", {"expect": ExpectSettings(dgx_os=rule)}
    torn = score[0] in "126"
    Case(sections, [words] * refused * torn, [words] * warned * torn, needs).check()


@pytest.mark.parametrize(
    ("ahead_s", "expected"),
    [
        (-86_400, ["clock|1,440 minutes behind|timedatectl"]),
        (7_200, ["clock|ahead|timedatectl"]),
        (-20, []),
    ],
)
def test_wrong_clock_gives_a_warning(ahead_s, expected):
    Case({"clock": [str(int(time.time()) + ahead_s)]}, [], expected).check()


def test_parent_directories_are_read_as_named_and_as_links_resolve(tmp_path):
    (tmp_path / "real/of ann").mkdir(parents=True)
    (tmp_path / "real/of ann").chmod(0o777)
    (tmp_path / "data").symlink_to(tmp_path / "real/of ann")
    script = disk.disk_script([f"{tmp_path}/data/models/new"])
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    lines = done.stdout.partition("== parents\n")[2].partition("== ")[0].splitlines()
    parents = {parent.path: parent for parent in disk.parse_parents(lines)}
    assert parents[f"{tmp_path}/data"].writer
    assert parents[f"{tmp_path}/real/of ann"].writer
    assert {"/", str(tmp_path), f"{tmp_path}/real"} <= set(parents)


def test_hosts_with_the_same_ssh_host_key_are_reported():
    key, other = (survey(host_key=[f"SHA256:{word}"]) for word in ("first", "second"))
    without = survey(host_key=[])
    warnings = same_host_key({"a": key, "b": other, "c": key, "d": without, "e": without})
    assert {name: problem.what for name, problem in warnings.items()} == {
        "a": "is also that of c",
        "c": "is also that of a",
    }


def test_all_problems_are_reported_at_once():
    surveyed = survey(
        sudo=["no", "ann"],
        smi=[],
        dpkg_audit=[" libc6  broken"],
        containers=[ollama()],
        meminfo=["MemTotal: 125513944 kB", "MemAvailable: 1000 kB"],
    )
    where = [str(p).split(":")[0] for p in judge(NEEDS, surveyed).problems]
    assert where == ["driver", "sudo", "packages", "container ollama", "memory"]


def test_memory_kept_for_a_kexec_handover_is_not_available():
    kept = [TOTAL, "MemAvailable: 120000000 kB", "CmaTotal: 0 kB"]
    without, with_handover = (
        survey(meminfo=[*kept, f"CmaFree: {kib} kB"]).memory.available_bytes for kib in (0, 9000000)
    )
    assert with_handover == without - 9000000 * 1024


def test_no_fix_removes_containers_or_volumes():
    kinds = ("Images", "Containers", "Local Volumes", "Build Cache")
    rows = [json.dumps({"Type": kind, "Reclaimable": "9.7GB (40%)"}) for kind in kinds]
    [problem] = problems(survey(**places(0, 1024, "/dev/a", docker_df=rows)))
    assert "docker image prune -a" in problem
    assert "docker builder prune -a" in problem
    for other in ("system prune", "container prune", "volume"):
        assert other not in problem


@pytest.mark.parametrize(("device", "expected"), [("7", []), ("8", ["80.0 GiB to be written"])])
def test_only_files_that_can_be_linked_need_no_room(device, expected):
    stored = [
        "device\t/srv/spark/models/x\t7",
        f"file\t{device}\t{80 << 30}\t/home/ann/.cache/huggingface/hub/x/blobs/{'ab' * 32}",
    ]
    needs = {"downloads": (("/srv/spark/models/x", (("ab" * 32, 80 << 30),)),)}
    Case(places(0, 26214400, stored=stored, **IMAGE), expected, None, needs).check()


@pytest.mark.parametrize(
    ("planned_gib", "fits"), [("90", True), ("82", True), ("80", False), ("", None)]
)
def test_memory_counts_what_the_stop_of_our_engine_frees(planned_gib, fits):
    """8.6 GiB are available and 90 GiB needed; an unmanaged process uses the GPU, too."""
    planned = str(int(planned_gib) << 30) if planned_gib else ""
    apps = {"compute_apps": ["78, python3"], "compute_cgroups": ["78 /user.slice/x"]}
    sections = {**SERVING, **apps, "engine-memory": [f"{SERVE_UNIT} {planned}"]}
    if fits is False:
        Case(sections, ["process python3", "memory"], []).check()
    else:
        Case(sections, [], ["process python3", *(["memory"] if fits is None else [])]).check()
