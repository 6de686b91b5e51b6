"""Preflight names every reason against a host, in words that say what to do."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_deploy.facts.machine import disk
from spark_deploy.facts.machine.survey import HostSurvey, Survey
from spark_deploy.preflight import judge
from spark_deploy.preflight.together import same_host_key
from tests.unit.facts.test_facts import output_of
from tests.unit.operations.test_operations import NEEDS

HEALTHY = {
    "meminfo": ["MemTotal: 125513944 kB", "MemAvailable: 120000000 kB"],
    "processes": [],
    "compute-apps": [],
    "containers": [],
    "listeners": [],
    "places": [
        "/srv/spark/models/x\t0\t/dev/nvme0n1p2\t3670016000\t/",
        "/var/lib/docker\t0\t/dev/nvme0n1p2\t3670016000\t/",
    ],
}
OLLAMA = (
    '{"id":"a1","name":"/ollama","image":"ollama/ollama","state":"STATE","restart":"RESTART",'
    '"runtime":"runc","requests":null,"labels":null}'
)


def survey(**sections: Any) -> Survey:
    case = Path(__file__).parents[1] / "facts" / "HostSurvey" / "factory_spark.yml"
    seen = yaml.safe_load(case.read_text())["sections"]
    return HostSurvey().process(
        output_of({**seen, **HEALTHY, **{k.replace("_", "-"): v for k, v in sections.items()}})
    )


def problems(seen: Survey, **needs: Any) -> list[str]:
    return [str(p) for p in judge(dataclasses.replace(NEEDS, **needs), seen).problems]


def warnings(seen: Survey, **needs: Any) -> list[str]:
    return [str(p) for p in judge(dataclasses.replace(NEEDS, **needs), seen).warnings]


def one(found: list[str], *words: str) -> None:
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_a_factory_spark_fits() -> None:
    assert problems(survey()) == []
    assert warnings(survey()) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ann/ann/755//data", "belongs to ann"),
        ("1007/1007/755//data", "belongs to 1007"),
        ("root/root/777//data", "by everybody"),
        ("root/users/2775//data", "by group users"),
    ],
)
def test_models_lie_where_nobody_but_root_can_put_others_in_their_place(
    line: str, words: str
) -> None:
    found = problems(survey(above=["root/root/755//", line]))
    one(found, "/data: ", words, "chown root: /data")


@pytest.mark.parametrize(
    "line", ["root/root/755//srv", "root/root/1777//tmp", "root/root/775//srv", "root/staff/755//a"]
)
def test_folders_above_in_which_only_root_can_replace_something_are_fine(line: str) -> None:
    assert problems(survey(above=["root/root/755//", line])) == []


def test_the_folders_above_are_asked_for_as_they_are_and_as_links_lead(tmp_path: Path) -> None:
    (tmp_path / "real/of ann").mkdir(parents=True)
    (tmp_path / "real/of ann").chmod(0o777)
    (tmp_path / "data").symlink_to(tmp_path / "real/of ann")
    script = disk.script([f"{tmp_path}/data/models/new"])
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False).stdout
    lines = said.partition("== above\n")[2].partition("== ")[0].splitlines()
    found = {one.path: one for one in disk.parse_above(lines)}
    assert found[f"{tmp_path}/data"].why_not_roots
    assert found[f"{tmp_path}/real/of ann"].why_not_roots
    assert {"/", str(tmp_path), f"{tmp_path}/real"} <= set(found)


def test_another_architecture_is_the_only_thing_said_of_a_wrong_host() -> None:
    one(problems(survey(uname=["x86_64", "6.1"], smi=[], pci=[])), "x86_64, expected aarch64")


def test_a_board_without_the_gpu_names_what_it_has() -> None:
    one(
        problems(survey(pci=["10de:2e03"], smi=[])),
        "no device 10de:2e12",
        "10de:2e03",
    )


@pytest.mark.parametrize(
    ("smi", "what", "fix"),
    [
        ([], "not installed", "never installs"),
        ([{"capture": "nvidia-smi--no-driver--01.txt"}, "rc=9"], "couldn't communicate", "reboot"),
        (
            [{"capture": "nvidia-smi--driver-library-mismatch--01.txt"}, "rc=18"],
            "version mismatch",
            "reboot",
        ),
        (["No devices were found", "rc=6"], "No devices", "power-cycle"),
        (["Segmentation fault", "rc=139"], "Segmentation", "dmesg"),
    ],
)
def test_each_broken_driver_is_told_apart_on_the_right_board(
    smi: list[Any], what: str, fix: str
) -> None:
    one(problems(survey(smi=smi)), "driver", what, fix)


def test_an_old_driver_is_refused_and_left_alone() -> None:
    found = problems(survey(smi=["NVIDIA GB10, 575.99.01", "rc=0"], module=[]))
    one(found, "575.99.01 is older than 580")


def test_a_module_that_is_not_the_librarys_is_named() -> None:
    one(problems(survey(smi=["NVIDIA GB10, 580.159.03", "rc=0"])), "580.142", "580.159.03")


def test_two_driver_branches_are_refused() -> None:
    found = problems(
        survey(driver_packages=["ii  nvidia-driver-580-open 580.1", "ii  nvidia-driver-590 590.4"])
    )
    one(found, "several branches", "580, 590")


def test_another_release_of_the_system_is_refused() -> None:
    one(problems(survey(os_release=["ID=ubuntu", 'VERSION_ID="26.04"'])), "expected ubuntu 24.04")


@pytest.mark.parametrize(
    ("rule", "refused", "warned"), [("require", 1, 0), ("warn", 0, 1), ("ignore", 0, 0)]
)
def test_plain_ubuntu_is_judged_by_the_rule(rule: str, refused: int, warned: int) -> None:
    plain = survey(dgx_release=[])
    assert len(problems(plain, dgx_release=rule)) == refused
    assert len(warnings(plain, dgx_release=rule)) == warned


def test_a_user_without_free_sudo_is_sent_to_bootstrap() -> None:
    one(problems(survey(sudo=["no", "ann"])), "ann cannot become root", "bootstrap")


@pytest.mark.parametrize(
    ("rule", "refused", "warned"), [("require", 1, 0), ("warn", 0, 1), ("ignore", 0, 0)]
)
@pytest.mark.parametrize("score", ["1", "2.6", "3", "6"])
def test_a_torn_vendor_update_is_judged_by_the_rule(
    rule: str, refused: int, warned: int, score: str
) -> None:
    torn = survey(torn=[f'{{"name": "OTA2.2", "torn": {score}}}'])
    found = problems(torn, updates=rule), warnings(torn, updates=rule)
    assert (len(found[0]), len(found[1])) == (refused, warned)
    assert all(f"torn score {score} against OTA2.2" in line for line in (*found[0], *found[1]))


@pytest.mark.parametrize("score", ["0", "0.0", '"?"'])
def test_a_whole_set_of_the_vendor_is_not_spoken_of(score: str) -> None:
    whole = survey(torn=[f'{{"name": "OTA2.2", "torn": {score}}}'])
    assert problems(whole, updates="require") == warnings(whole) == []


@pytest.mark.parametrize(
    "name", ["docker.io", "libnvidia-compute-580", "linux-image-6.17", "libc6"]
)
def test_half_installed_packages_that_an_engine_stands_on_are_refused(name: str) -> None:
    found = problems(survey(dpkg_audit=["bad:", f" {name}  something", " language-pack-de  x"]))
    one(found, f"half installed: {name}\n", "dpkg --configure -a")


def test_half_installed_packages_of_others_are_a_warning() -> None:
    # As a Spark comes out of its box.
    seen = survey(dpkg_audit=["not configured:", " language-pack-gnome-de-base  translations"])
    assert problems(seen) == []
    one(warnings(seen), "language-pack-gnome-de-base", "does not need")


def test_memory_that_is_free_only_by_count_is_told_with_the_cure() -> None:
    kept = ["MemTotal: 127601228 kB", "MemAvailable: 120639488 kB", "CmaTotal: 0 kB"]
    seen = survey(meminfo=[*kept, "CmaFree: 9748480 kB"])
    assert problems(seen) == []
    one(warnings(seen), "9.3 GiB", "kho=off")
    assert warnings(survey(meminfo=[*kept[:2], "CmaTotal: 131072 kB", "CmaFree: 118784 kB"])) == []


def test_hosts_that_show_one_ssh_host_key_are_told_of_each_other() -> None:
    key, other = (survey(host_key=[f"SHA256:{word}"]) for word in ("one", "other"))
    without = survey(host_key=[])
    found = same_host_key({"a": key, "b": other, "c": key, "d": without, "e": without})
    assert {name: problem.what for name, problem in found.items()} == {
        "a": "is also that of c",
        "c": "is also that of a",
    }


def test_a_daemon_that_is_down_is_a_warning_and_one_that_hangs_a_problem() -> None:
    assert problems(survey(containers=["unreachable failed"])) == []
    one(warnings(survey(containers=["unreachable failed"])), "its unit is failed")
    one(problems(survey(containers=["unreachable active"])), "does not answer")


def test_a_pending_reboot_is_only_a_warning() -> None:
    seen = survey(reboot=["required", "libc6"])
    assert problems(seen) == []
    one(warnings(seen), "libc6")


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


def test_memory_that_the_kernel_keeps_for_its_handover_is_not_available() -> None:
    kept = ["MemTotal: 125513944 kB", "MemAvailable: 120000000 kB", "CmaTotal: 0 kB"]
    without = survey(meminfo=[*kept, "CmaFree: 0 kB"]).memory.available_bytes
    assert survey(meminfo=[*kept, "CmaFree: 9000000 kB"]).memory.available_bytes == (
        without - 9000000 * 1024
    )


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
    one(problems(seen), "/home/ann/venv/bin/python3", "pid 78 uses the GPU")
    assert problems(seen, allow_memory_holders=("python3",)) == []


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
    one(problems(seen, memory_total_min_bytes=117 << 30), "113.5 GiB in all", fix)


def test_a_process_that_holds_memory_is_a_warning_when_memory_suffices() -> None:
    seen = survey(processes=["9 2097152 /user.slice/x gnome-shell"])
    assert problems(seen) == []
    one(warnings(seen), "gnome-shell")
    assert warnings(seen, allow_memory_holders=("gnome-shell",)) == []


def test_a_stranger_on_the_gpu_is_refused_even_when_memory_suffices() -> None:
    one(problems(survey(compute_apps=["9, /opt/x/python3"])), "/opt/x/python3", "uses the GPU")
    assert (
        problems(survey(compute_apps=["9, /opt/x/python3"]), allow_memory_holders=("python3",))
        == []
    )


def test_a_stranger_on_our_port_is_named_and_our_gateway_is_not() -> None:
    case = Path(__file__).parents[1] / "facts" / "HostSurvey" / "port_taken.yml"
    ports = yaml.safe_load(case.read_text())["sections"]
    seen = survey(listeners=ports["listeners"], listener_cgroups=ports["listener-cgroups"])
    assert problems(seen, ports=(8000,)) == []
    one(problems(seen, ports=(8001,)), "port 8001", "docker-proxy (pid 99)")
    one(problems(seen, ports=(8002,)), "someone")
    assert problems(seen, ports=(9000,)) == []


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
        "11.5 GiB of images",
    )


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


def test_a_smaller_machine_is_refused() -> None:
    one(problems(survey(), memory_total_min_bytes=200 << 30), "119.7 GiB in all")


def test_everything_is_said_at_once() -> None:
    seen = survey(
        sudo=["no", "ann"],
        smi=[],
        dpkg_audit=[" libc6  broken"],
        containers=[OLLAMA.replace("STATE", "running").replace("RESTART", "always")],
        meminfo=["MemTotal: 125513944 kB", "MemAvailable: 1000 kB"],
    )
    where = [str(p).split(":")[0] for p in judge(NEEDS, seen).problems]
    assert where == ["driver", "sudo", "packages", "container ollama", "memory"]


def test_a_tailnet_is_only_asked_for_when_the_gateway_needs_it() -> None:
    silent = survey(tailscale=["sh: 1: tailscale: not found"])
    assert problems(silent) == []
    one(problems(silent, tailscale=True), "tailscale", "not found", "`tailscale up`")
    stopped = survey(tailscale=["no current Tailscale IPs; state: Stopped"])
    one(problems(stopped, tailscale=True), "state: Stopped", "serve.expose")
    assert problems(survey(tailscale=["100.101.102.103"]), tailscale=True) == []


@pytest.mark.parametrize(("away_s", "words"), [(-86_400, "1,440 minutes behind"), (7_200, "ahead")])
def test_a_clock_that_is_hours_away_is_a_warning(away_s: int, words: str) -> None:
    one(warnings(survey(clock=[str(int(time.time()) + away_s)])), "clock", words, "timedatectl")


def test_a_clock_that_is_seconds_away_is_none() -> None:
    assert warnings(survey(clock=[str(int(time.time()) - 20)])) == []
