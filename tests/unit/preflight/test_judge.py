"""Preflight reports every reason against a host, with a fix."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lab.memory import BUDDYINFO
from spark_deploy.config.settings.host import ExpectSettings
from spark_deploy.hosts import disk
from spark_deploy.hosts.preflight import judge, same_host_key
from tests.unit.operations.test_operations import NEEDS
from tests.unit.preflight.surveyed import Case, ollama, survey

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
}


@pytest.mark.parametrize("name", CASES)
def test_each_condition_is_a_problem_a_warning_or_neither(name: str) -> None:
    CASES[name].check()


@pytest.mark.parametrize(("rule", "refused", "warned"), RULES)
def test_plain_ubuntu_is_judged_by_the_rule(rule: Any, refused: int, warned: int) -> None:
    needs = {"expect": ExpectSettings(dgx_os=rule)}
    Case({"dgx_release": []}, ["DGX OS"] * refused, ["DGX OS"] * warned, needs).check()


@pytest.mark.parametrize(("rule", "refused", "warned"), RULES)
@pytest.mark.parametrize("score", ["1", "2.6", "3", "6"])
def test_a_torn_vendor_update_is_judged_by_the_rule(
    rule: Any, refused: int, warned: int, score: str
) -> None:
    sections = {"torn": [f'{{"name": "OTA2.2", "torn": {score}}}']}
    words, needs = f"torn score {score} against OTA2.2", {"expect": ExpectSettings(dgx_os=rule)}
    Case(sections, [words] * refused, [words] * warned, needs).check()


@pytest.mark.parametrize("score", ["0", "0.0", '"?"'])
def test_a_complete_vendor_set_is_not_mentioned(score: str) -> None:
    sections = {"torn": [f'{{"name": "OTA2.2", "torn": {score}}}']}
    Case(sections, [], [], {"expect": ExpectSettings(dgx_os="require")}).check()


@pytest.mark.parametrize(
    "name", ["docker.io", "libnvidia-compute-580", "linux-image-6.17", "libc6"]
)
def test_half_installed_packages_of_the_engine_are_refused(name: str) -> None:
    audit = ["bad:", f" {name}  something", " language-pack-de  x"]
    Case({"dpkg_audit": audit}, [f"half installed: {name}\n|dpkg --configure -a"]).check()


@pytest.mark.parametrize(
    ("ahead_s", "expected"),
    [
        (-86_400, ["clock|1,440 minutes behind|timedatectl"]),
        (7_200, ["clock|ahead|timedatectl"]),
        (-20, []),
    ],
)
def test_a_wrong_clock_is_a_warning(ahead_s: int, expected: list[str]) -> None:
    Case({"clock": [str(int(time.time()) + ahead_s)]}, [], expected).check()


def test_parent_directories_are_read_as_named_and_as_links_resolve(tmp_path: Path) -> None:
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


def test_hosts_with_the_same_ssh_host_key_are_reported() -> None:
    key, other = (survey(host_key=[f"SHA256:{word}"]) for word in ("first", "second"))
    without = survey(host_key=[])
    warnings = same_host_key({"a": key, "b": other, "c": key, "d": without, "e": without})
    assert {name: problem.what for name, problem in warnings.items()} == {
        "a": "is also that of c",
        "c": "is also that of a",
    }


def test_all_problems_are_reported_at_once() -> None:
    surveyed = survey(
        sudo=["no", "ann"],
        smi=[],
        dpkg_audit=[" libc6  broken"],
        containers=[ollama()],
        meminfo=["MemTotal: 125513944 kB", "MemAvailable: 1000 kB"],
    )
    where = [str(p).split(":")[0] for p in judge(NEEDS, surveyed).problems]
    assert where == ["driver", "sudo", "packages", "container ollama", "memory"]
