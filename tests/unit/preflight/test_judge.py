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
from spark_deploy.hosts.preflight import check_survey, host_key_problems
from tests.unit.operations.test_operations import NEEDS
from tests.unit.preflight.surveyed import Case, ollama, problems, survey

RULES: list[tuple[Any, int, int]] = [("require", 1, 0), ("warn", 0, 1), ("ignore", 0, 0)]
NO_DRIVER = {"capture": "nvidia-smi--no-driver--01.txt"}
MISMATCH = {"capture": "nvidia-smi--driver-library-mismatch--01.txt"}
OTHER_MODULE = {"capture": "proc-driver-nvidia-version--mismatch-x86--02.txt"}
INCOMPLETE = {"capture": "nvidia-spark-ota-check--torn-score--03.txt"}
ENGINE_SERVES = {"capture": "meminfo--serving-first-lines--01.txt"}
ROOT = "root/root/755//"
POOL = ["MemTotal: 127601228 kB", "MemAvailable: 120639488 kB"]


def kernel(release, parameters):
    return {"uname": ["aarch64", release], "kernels": [release], "kernel_parameters": [parameters]}


def fragmented(name):
    return {"buddyinfo": ["4096", *(BUDDYINFO / f"{name}.txt").read_text().splitlines()]}


def writable(line, words):
    return Case({"parents": [ROOT, line]}, [f"/data: |{words}|chown root: /data"])


TOTAL = "MemTotal: 125513944 kB"
IMAGE = {"images": ["spark-vllm:0123456789ab"]}


def memory(available_kib, total=TOTAL, **more):
    return {"meminfo": [total, f"MemAvailable: {available_kib} kB"], **more}


def places(present_kib, available_kib, docker="/dev/b", **more):
    mount = "/" if docker == "/dev/a" else "/var/lib/docker"
    return {
        "paths": [
            f"/srv/spark/models/x\t{present_kib}\t/dev/a\t{available_kib}\t/",
            f"/var/lib/docker\t0\t{docker}\t{available_kib}\t{mount}",
        ],
        **more,
    }


def small(total_gib, needed_gib=90):
    return {"memory_total_min_bytes": total_gib << 30, "memory_needed_bytes": needed_gib << 30}


ON_GPU = (
    '{"id":"ID","name":"/images","image":"my/flux:1","state":"running","restart":"always",'
    '"runtime":"nvidia","requests":null,"labels":null,"visible":["all",null]}'
).replace("ID", "c0" * 32)
CONTAINER_UNIT = f"docker-{'c0' * 32}.scope"
ON_OUR_PORT = ON_GPU.replace('"labels":', '"ports":{"80/tcp":[{"HostPort":"8000"}]},"labels":')
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


def gateways(**ports):
    return {
        "ports": tuple(ports.values()),
        "gateways": {name: (port,) for name, port in ports.items()},
    }


def unit(name):
    return {"processes": [f"77 62914560 /system.slice/{name} python3"]}


def engine(*cgroups):
    apps = ["77, VLLM::EngineCore"]
    return {**SERVING, "compute_apps": apps, "compute_cgroups": list(cgroups)}


def fits(needs=None, **sections):
    return Case(sections, [], [], needs or {})


def rejected(*problems, needs=None, **sections):
    return Case(sections, [*problems], None, needs or {})


def warned(*warnings, **sections):
    return Case(sections, [], [*warnings])


GNOME_SHELL = ["9 2097152 /user.slice/x gnome-shell"]
LANGUAGE = " language-pack-gnome-de-base  translations"
NO_TAILSCALE = ["sh: 1: tailscale: not found"]
DROP_IN = "/etc/systemd/system/spark-serve@.service.d/override.conf"
UNIT_FILES = [f"f {DROP_IN.replace('/spark-', '/ spark-')}"]
TAILSCALE, IP = {"tailscale": True}, "100.101.102.103"
CASES = {
    "factory Spark": fits(),
    "drop-in of a local administrator": rejected(f"{DROP_IN}|remove", unit_files=UNIT_FILES),
    "drop-in that the owner accepts": fits(
        {"expect": ExpectSettings(unit_overrides=(DROP_IN,))}, unit_files=UNIT_FILES
    ),
    "read-only disk": rejected("/var/lib is read-only|remount", read_only=["/var/lib"]),
    # Other users must not be able to replace models.
    "owned by a user": writable("ann/ann/755//data", "ann owns this"),
    "owned by an unknown user": writable("1007/1007/755//data", "1007 owns this"),
    "world-writable": writable("root/root/777//data", "every user can"),
    "group-writable": writable("root/users/2775//data", "group users can"),
    "root only": fits(parents=[ROOT, "root/root/755//srv"]),
    "sticky": fits(parents=[ROOT, "root/root/1777//tmp"]),
    "group root": fits(parents=[ROOT, "root/root/775//srv"]),
    "other group without write access": fits(parents=[ROOT, "root/staff/755//a"]),
    "architecture": rejected("architecture|x86_64|aarch64", uname=["x86_64", "6"], smi=[], pci=[]),
    "board": rejected("PCI|device 10de:2e12|10de:2e03", pci=["10de:2e03"], smi=[]),
    "no nvidia-smi": rejected("driver|not installed|never installs", smi=[]),
    "no driver": rejected("driver|couldn't communicate|reboot", smi=[NO_DRIVER, "rc=9"]),
    "mismatch": rejected("driver|version mismatch|reboot", smi=[MISMATCH, "rc=18"]),
    "no devices": rejected("driver|power-cycle", smi=["No devices were found", "rc=6"]),
    "smi crashes": rejected("driver|Segmentation|dmesg", smi=["Segmentation fault", "rc=139"]),
    "old driver": rejected("driver|575.99.01|580", smi=["NVIDIA GB10, 575.99.01"], module=[]),
    "other module": rejected("580.142|580.159.03", smi=["NVIDIA GB10, 580.159.03"]),
    "older library": rejected("module 580.173.02|library 580.142|reboot", module=OTHER_MODULE),
    "two driver branches": rejected(
        "driver|580, 590",
        driver_packages=["ii  nvidia-driver-580-open 580.1", "ii  nvidia-driver-590 590.4"],
    ),
    # Ubuntu turns the packages of an old branch into empty packages that need the new branch.
    "transitional driver package": fits(
        driver_packages=["ii  nvidia-driver-575-open 580.1", "ii  nvidia-driver-580-open 580.1"]
    ),
    "system": rejected("expected ubuntu 24.04", os_release=["ID=ubuntu", 'VERSION_ID="26.04"']),
    "sudo": rejected("sudo|ann cannot become root|bootstrap", sudo=["no", "ann"]),
    **{
        f"half-installed {name}": rejected(
            f"half installed: {name}\n|dpkg --configure -a", dpkg_audit=[f" {name}  x", LANGUAGE]
        )
        for name in ("libnvidia-compute-580", "linux-image-6.17", "libc6")
    },
    **{
        f"half-installed {name}": warned(f"packages|{name}\n|deploy", dpkg_audit=[f" {name}  x"])
        for name in ("docker.io", "containerd", "nginx-light", "libnvidia-container1")
    },
    "half-installed language": warned("packages|language-pack-gnome-de", dpkg_audit=[LANGUAGE]),
    "memory of a kexec handover": warned(
        "kernel|9.3 GiB|kho=off", meminfo=[*POOL, "CmaTotal: 0 kB", "CmaFree: 9748480 kB"]
    ),
    "memory that only a kexec handover leaves free": rejected(
        "memory|82.3 GiB available",
        meminfo=[TOTAL, "MemAvailable: 96000000 kB", "CmaTotal: 0 kB", "CmaFree: 9748480 kB"],
    ),
    "CMA": fits(meminfo=[*POOL, "CmaTotal: 131072 kB", "CmaFree: 118784 kB"]),
    "faulty kernel": warned("kernel|1019-nvidia|kho=off", **kernel("7.0.0-1019-nvidia", "quiet")),
    "faulty kernel with parameter": fits(**kernel("7.0.0-1019-nvidia", "quiet kho=off")),
    "newer kernel": fits(**kernel("6.17.0-1032-nvidia", "quiet")),
    "blocks healthy": fits(**fragmented("healthy")),
    "blocks fragmented": warned("memory is fragmented", **fragmented("fragmented")),
    "blocks low": fits(**fragmented("low")),
    "docker down": warned("docker is failed", containers=["unreachable failed"]),
    "docker silent": rejected("docker|does not respond", containers=["unreachable active"]),
    "docker without sudo": rejected(
        "cannot become root", sudo=["no", "ann"], containers=["unreachable active"]
    ),
    "incomplete update": warned("torn score 3 relative to OTA2.2|DGX Dashboard", torn=INCOMPLETE),
    "pending reboot": warned("reboot|libc6", reboot=["required", "libc6"]),
    "smaller pool": rejected("119.7 GiB of memory", needs={"memory_total_min_bytes": 200 << 30}),
    "no tailscale, not needed": fits(tailscale=NO_TAILSCALE),
    "no tailscale": rejected("not found|`tailscale up`", needs=TAILSCALE, tailscale=NO_TAILSCALE),
    "tailscale stopped": rejected(
        "tailscale|Stopped", needs=TAILSCALE, tailscale=["no Tailscale IPs; state: Stopped"]
    ),
    "tailscale": fits(TAILSCALE, tailscale=["100.101.102.103"]),
    "tailscale with a warning": fits(
        TAILSCALE,
        tailscale=['Warning: client version "1.90.6" != tailscaled server version "1.88.3"', IP],
    ),
    "an engine serves": rejected("memory|24.3 GiB|stop", meminfo=ENGINE_SERVES),
    "a process uses the memory": rejected(
        *("process llama-server|40.0 GiB", "memory|57.2 GiB available"),
        **memory(60000000, processes=["9 41943040 /user.slice/x llama-server"]),
    ),
    # The reported share suffices with the engine's own margin:
    # 0.74 * 1.02 * 125513944 <= 96000000 < 0.75 * 1.02 * 125513944
    "too little memory": rejected(
        "memory|91.6 GiB available|needs 97.0 GiB|lower engine.memory_fraction to 0.74",
        needs=small(110, 97), **memory(96000000),
    ),
    "smaller pool than planned": rejected(
        "memory|113.5 GiB of memory|set memory.total_gib to 113.4",
        needs=small(117), **memory(115000000, "MemTotal: 119000000 kB"),
    ),
    "host smaller than the engine": rejected(
        "23.5 GiB of memory|117.0 GiB|97.0 GiB|smaller model|--data memory.total_gib=23.5",
        needs=small(117, 97), **memory(23000000, "MemTotal: 24641536 kB"),
    ),
    "a process, and enough memory": warned("process gnome-shell", processes=GNOME_SHELL),
    "an allowed process": fits({"allow_memory_holders": ("gnome-shell",)}, processes=GNOME_SHELL),
    "two places on a filesystem": rejected(
        "disk /: only 100.0 GiB are|writes 100.0 GiB|keeps 20.0 GiB free|free 20.0 GiB"
        "|`docker image prune -a`|up to 11.5 GiB", **places(0, 104857600, "/dev/a"),
    ),
    "bytes in place": fits(**places(83886080, 26214400, **IMAGE)),
    "full disk, nothing to write": fits(**places(83886080, 1024, "/dev/a", **IMAGE)),
    **{
        f"container {state} {restart}": rejected(
            f"ollama|{state}|{restart}|takeover", containers=[ollama(state, restart)]
        )
        for state, restart in (
            *(("running", "no"), ("restarting", "on-failure")),
            *(("running", "unless-stopped"), ("exited", "always")),
        )
    },
    **{
        f"container stopped {restart}": fits(containers=[ollama("exited", restart)])
        for restart in ("no", "unless-stopped", "on-failure")
    },
    "container named after the machine": rejected(
        "container spark-vllm", containers=[ollama(name="spark-vllm")]
    ),
    "our container": fits(containers=[ollama(name="spark-main-0123456789ab")]),
    "container to take over": fits({"takeover": ("ollama",)}, containers=[ollama()]),
    **{
        f"engine to take over on our port, {process}": Case(
            {
                "containers": [ON_OUR_PORT], "meminfo": ENGINE_SERVES,
                "listeners": [f'LISTEN 0 1 0.0.0.0:8000 *:* users:(("{process}",pid=5,fd=7))'],
                "listener_cgroups": [f"5 /system.slice/{unit}"],
            },
            [], ["memory|24.3 GiB available|unknown"], {"takeover": ("images",), "ports": (8000,)},
        )
        for process, unit in (("docker-proxy", "docker.service"), ("vllm", CONTAINER_UNIT))
    },
    "unit named after the machine": warned("process python3", **unit("spark-vllm.service")),
    "our unit": fits(**unit(SERVE_UNIT)),
    "allowed container": fits({"allow_containers": ("images",)}, **IN_CONTAINER),
    "container on the GPU": rejected("container images", **IN_CONTAINER),
    "container without the GPU": fits(
        containers=[ON_GPU.replace("images", "qdrant").replace('"all",', "")]
    ),
    "our engine": fits(**engine(OUR_CGROUP)),
    "our engine without cgroup": fits(**engine("77 ")),
    "our engine has exited": fits(**engine()),
    "process on the GPU": warned(
        "/home/ann/venv/bin/python3|pid 78 uses the GPU", **SERVING, **UNMANAGED_PROCESS
    ),
    "allowed process on the GPU": fits(
        {"allow_memory_holders": ("python3",)}, **SERVING, **UNMANAGED_PROCESS
    ),
    "process on the GPU and in memory": rejected(
        *("process y|pid 9 uses 2.0 GiB and the GPU", "memory|57.2 GiB available"),
        **memory(60000000, compute_apps=["9, /x/python3"], processes=["9 2097152 /user.slice/x y"]),
    ),
    "our gateway": fits({"ports": (8000,)}, **LISTENERS),
    "port taken": rejected("8001|docker-proxy (pid 99)", needs={"ports": (8001,)}, **LISTENERS),
    "port of the kernel": rejected("8002|a process", needs={"ports": (8002,)}, **LISTENERS),
    "port free": fits({"ports": (9000,)}, **LISTENERS),
    "services swap ports": rejected(
        "port 8001|the gateway of embed is still listening",
        needs=gateways(main=8000, embed=8002, rank=8001), **EMBED_LISTENS,
    ),
    "ports as before": fits(gateways(main=8000, embed=8001, rank=8002), **EMBED_LISTENS),
    "service no longer listed": fits(gateways(main=8000, vectors=8001), **EMBED_LISTENS),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_preflight_reports_the_expected_problems_and_warnings(name):
    CASES[name].check()


@pytest.mark.parametrize(("rule", "refused", "warned"), RULES)
def test_plain_ubuntu_is_accepted_only_if_configured(rule, refused, warned):
    needs = {"expect": ExpectSettings(dgx_os=rule)}
    Case({"dgx_release": []}, ["DGX OS"] * refused, ["DGX OS"] * warned, needs).check()


@pytest.mark.parametrize(("rule", "refused", "warned"), RULES)
@pytest.mark.parametrize("score", ["1", "2.6", "6", "0", "0.0", '"?"'])
def test_incomplete_vendor_update_is_rejected_or_warned_about_as_configured(
    rule, refused, warned, score
):
    sections = {"torn": [f'{{"name": "OTA2.2", "torn": {score}}}']}
    words, needs = f"torn score {score} relative to OTA2.2", {"expect": ExpectSettings(dgx_os=rule)}
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
def test_preflight_warns_about_a_wrong_clock(ahead_s, expected):
    Case({"clock": [str(int(time.time()) + ahead_s)]}, [], expected).check()


def test_parent_directories_are_checked_before_and_after_resolving_links(tmp_path):
    (tmp_path / "real/of ann").mkdir(parents=True)
    (tmp_path / "real/of ann").chmod(0o777)
    (tmp_path / "data").symlink_to(tmp_path / "real/of ann")
    script = disk.disk_script([f"{tmp_path}/data/models/new"])
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    lines = done.stdout.partition("== parents\n")[2].partition("== ")[0].splitlines()
    parents = {parent.path: parent for parent in disk.parse_parents(lines)}
    assert parents[f"{tmp_path}/data"].write_risk
    assert parents[f"{tmp_path}/real/of ann"].write_risk
    assert {"/", str(tmp_path), f"{tmp_path}/real"} <= set(parents)


def test_hosts_with_the_same_ssh_host_key_are_reported():
    key, other = (survey(host_key=[f"SHA256:{word}"]) for word in ("first", "second"))
    without = survey(host_key=[])
    surveys = {"a": key, "b": other, "c": key, "d": without, "e": without}
    warnings = [(name, p.what) for name in surveys for p in host_key_problems(name, surveys)]
    assert warnings == [("a", "the same key is used by c"), ("c", "the same key is used by a")]


def test_all_problems_are_reported_at_once():
    surveyed = survey(
        sudo=["no", "ann"],
        smi=[],
        dpkg_audit=[" libc6  broken"],
        containers=[ollama()],
        meminfo=["MemTotal: 125513944 kB", "MemAvailable: 1000 kB"],
    )
    where = [str(p).split(":")[0] for p in check_survey(NEEDS, surveyed).problems]
    assert where == ["driver", "sudo", "packages", "container ollama", "memory"]


def test_no_suggested_fix_removes_containers_or_volumes():
    kinds = ("Images", "Containers", "Local Volumes", "Build Cache")
    rows = [json.dumps({"Type": kind, "Reclaimable": "9.7GB (40%)"}) for kind in kinds]
    [problem] = problems(survey(**places(0, 1024, "/dev/a", docker_df=rows)))
    assert "docker image prune -a" in problem
    assert "docker builder prune -a" in problem
    for other in ("system prune", "container prune", "volume"):
        assert other not in problem


@pytest.mark.parametrize(("device", "expected"), [("7", []), ("8", ["the deploy writes 80.0 GiB"])])
def test_hard_linkable_files_need_no_disk_space_but_others_do(device, expected):
    stored = [
        "device\t/srv/spark/models/x\t7",
        f"file\t{device}\t{80 << 30}\t/home/ann/.cache/huggingface/hub/x/blobs/{'ab' * 32}",
    ]
    needs = {"downloads": (("/srv/spark/models/x", (("ab" * 32, 80 << 30),)),)}
    Case(places(0, 26214400, stored=stored, **IMAGE), expected, None, needs).check()


@pytest.mark.parametrize(
    ("planned_gib", "fits"), [("90", True), ("82", True), ("80", False), ("", None)]
)
def test_memory_freed_by_stopping_our_engine_counts_as_available(planned_gib, fits):
    planned = str(int(planned_gib) << 30) if planned_gib else ""
    apps = {"compute_apps": ["78, python3"], "compute_cgroups": ["78 /user.slice/x"]}
    sections = {**SERVING, **apps, "engine-memory": [f"{SERVE_UNIT} {planned}"]}
    if fits is False:
        Case(sections, ["process python3", "memory"], []).check()
    else:
        Case(sections, [], ["process python3", *(["memory"] if fits is None else [])]).check()
