"""Preflight names every reason against a host, in words that say what to do."""

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
from tests.unit.preflight.surveyed import OLLAMA, one, problems, survey, warnings


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
    script = disk.disk_script([f"{tmp_path}/data/models/new"])
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False).stdout
    lines = said.partition("== above\n")[2].partition("== ")[0].splitlines()
    found = {one.path: one for one in disk.parse_above(lines)}
    assert found[f"{tmp_path}/data"].writer
    assert found[f"{tmp_path}/real/of ann"].writer
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
    assert len(problems(plain, expect=ExpectSettings(dgx_release=rule))) == refused
    assert len(warnings(plain, expect=ExpectSettings(dgx_release=rule))) == warned


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
    found = (
        problems(torn, expect=ExpectSettings(updates=rule)),
        warnings(torn, expect=ExpectSettings(updates=rule)),
    )
    assert (len(found[0]), len(found[1])) == (refused, warned)
    assert all(f"torn score {score} against OTA2.2" in line for line in (*found[0], *found[1]))


@pytest.mark.parametrize("score", ["0", "0.0", '"?"'])
def test_a_whole_set_of_the_vendor_is_not_spoken_of(score: str) -> None:
    whole = survey(torn=[f'{{"name": "OTA2.2", "torn": {score}}}'])
    assert problems(whole, expect=ExpectSettings(updates="require")) == warnings(whole) == []


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


@pytest.mark.parametrize(
    ("kernel", "parameters", "named"),
    [
        ("7.0.0-1019-nvidia", "quiet", True),
        ("7.0.0-1019-nvidia", "quiet kho=off", False),
        ("6.17.0-1032-nvidia", "quiet", False),
    ],
)
def test_a_kernel_with_a_known_fault_is_named_unless_its_cure_is_set(
    kernel: str, parameters: str, named: bool
) -> None:
    seen = survey(uname=["aarch64", kernel], kernels=[kernel], kernel_parameters=[parameters])
    assert problems(seen) == []
    assert len([line for line in warnings(seen) if kernel in line and "kho=off" in line]) == named


@pytest.mark.parametrize(("name", "count"), [("healthy", 0), ("fragmented", 1), ("low", 0)])
def test_fragmented_memory_is_a_warning(name: str, count: int) -> None:
    lines = (BUDDYINFO / f"{name}.txt").read_text().splitlines()
    seen = survey(buddyinfo=["4096", *lines])
    assert problems(seen) == []
    found = [line for line in warnings(seen) if line.startswith("memory: fragmented")]
    assert len(found) == count


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


def test_a_smaller_machine_is_refused() -> None:
    one(problems(survey(), memory_total_min_bytes=200 << 30), "119.7 GiB in total")


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
