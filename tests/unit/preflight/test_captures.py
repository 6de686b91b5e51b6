"""What real hosts printed, piece by piece in a whole Spark's place: the healthy are taken.

Each capture is of a GB10 host (or of a tool that prints the same everywhere). A piece of a healthy
host must not be refused, whatever else a release of DGX OS changes; a broken one must be, or be
warned of, in the words that lead to the cure.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from spark_host.engine import logs

from spark_deploy.hosts.gpu import CudaState, Toolkit
from tests.unit.facts.test_facts import CAPTURES
from tests.unit.preflight.surveyed import problems, survey, warnings
from tests.unit.shell import install_stub, run_script

MODULE = {"580.142": "proc-driver-nvidia-version--580.142--03.txt",
          "580.126.09": "proc-driver-nvidia-version--580.126.09--01.txt"}  # fmt: skip


def lines(name: str) -> list[str]:
    return (CAPTURES / name).read_text().splitlines()


def uname(name: str) -> dict[str, Any]:
    [line] = lines(name)
    release, arch = line.split()[2], line.split()[-2]
    return {"uname": [arch, release], "kernels": [release]}


def smi(name: str) -> dict[str, Any]:
    """Return our own two columns of a query that asked for more."""
    cells = lines(name)[-1].split(", ")
    driver = next(cell for cell in cells if re.fullmatch(r"\d{3}\.\d+(\.\d+)?", cell))
    gpu = next(cell for cell in cells if cell.startswith("NVIDIA"))
    return {"smi": [f"{gpu}, {driver}", "rc=0"], "module": {"capture": MODULE[driver]}}


def pci(name: str) -> dict[str, Any]:
    return {"pci": re.findall(r"\[(\w{4}:\w{4})\]", "\n".join(lines(name)))}


def whole(section: str, **more: Any) -> Any:
    return lambda name: {section: {"capture": name}, **more}


HEALTHY: dict[str, Any] = {
    "dgx-release--ota-7.3.1--02.txt": whole("dgx-release"),
    "dgx-release--ota-7.5.0--01.txt": whole("dgx-release"),
    "dgx-release--two-ota-blocks--03.txt": whole("dgx-release"),
    "os-release--24.04.4--01.txt": whole("os-release"),
    "uname--a-6.14.0-1013--02.txt": uname,
    "uname--a-6.17.0-1014--03.txt": uname,
    "uname--a-6.17.0-1021--01.txt": uname,
    "lspci--nn-nvidia--01.txt": pci,
    "nvidia-smi--query-csv-noheader--01.txt": smi,
    "nvidia-smi--query-csv-noheader--06.txt": smi,
    "nvidia-smi--query-csv-with-header--05.txt": smi,
    "ss--tlnp--01.txt": whole("listeners"),
    # Memory is short because an engine of ours has it.
    "meminfo--serving-first-lines--01.txt": whole(
        "meminfo",
        serving=["spark-serve@main-0123456789ab.service"],
        engine_memory=[f"spark-serve@main-0123456789ab.service {90 << 30}"],
    ),
}
WARNED = {
    "nvidia-spark-ota-check--torn-score--03.txt": (
        whole("torn"), "torn score 3 against OTA2.2", "DGX Dashboard",
    ),
}  # fmt: skip
REFUSED = {
    "nvidia-smi--no-driver--01.txt": (
        lambda name: {"smi": [{"capture": name}, "rc=9"], "module": []},
        "couldn't communicate with the NVIDIA driver", "reboot",
    ),
    "nvidia-smi--driver-library-mismatch--01.txt": (
        lambda name: {"smi": [{"capture": name}, "rc=18"]},
        "Driver/library version mismatch", "reboot",
    ),
    "proc-driver-nvidia-version--mismatch-x86--02.txt": (
        whole("module"), "module 580.173.02 is loaded, library 580.142 is installed", "reboot",
    ),
    "meminfo--serving-first-lines--01.txt": (whole("meminfo"), "24.3 GiB", "stop"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_piece_of_a_healthy_spark_is_neither_refused_nor_warned_of(name: str) -> None:
    seen = survey(**HEALTHY[name](name))
    assert (problems(seen), warnings(seen)) == ([], [])


def test_all_pieces_together_are_a_healthy_spark() -> None:
    sections: dict[str, Any] = {}
    for name, make in HEALTHY.items():
        sections |= make(name)
    assert problems(survey(**sections)) == []


@pytest.mark.parametrize("name", WARNED)
def test_a_piece_that_an_owner_should_know_of_is_warned_of(name: str) -> None:
    make, what, fix = WARNED[name]
    seen = survey(**make(name))
    assert problems(seen) == []
    [said] = warnings(seen)
    assert what in said
    assert fix in said


@pytest.mark.parametrize("name", REFUSED)
def test_a_piece_of_a_broken_host_is_refused_with_the_cure(name: str) -> None:
    make, what, fix = REFUSED[name]
    found = problems(survey(**make(name)))
    assert len(found) == 1, found
    assert what in found[0]
    assert fix in found[0]


TROUBLES = {
    "journalctl--nvrm-no-memory--01.txt": {"no_memory": 1},
    "journalctl--nvrm-no-memory-three-lines--02.txt": {"no_memory": 3},
    "journalctl--xid-119-gsp-timeout--01.txt": {"xid": 2},
    "journalctl--xid-13-illegal-instruction--02.txt": {"xid": 1},
    "journalctl--xid-79-with-prefix--03.txt": {"xid": 1},
    "dmesg--oom-kill-container--02.txt": {"oom_kills": 1},
}


@pytest.mark.parametrize("name", TROUBLES)
def test_what_the_kernel_told_on_real_hosts_is_counted(name: str) -> None:
    nothing = {"xid": 0, "no_memory": 0, "oom_kills": 0}
    assert logs.parse_kernel_faults((CAPTURES / name).read_text()) == {**nothing, **TROUBLES[name]}


def test_starts_of_real_engines_are_read() -> None:
    one_spark = list(logs.start_messages(lines("vllm-log--kv-cache-one-spark-qwen3.6-35b--03.txt")))
    assert logs.kv_cache_tokens(one_spark) == 1_253_392
    assert logs.sizes_bytes(one_spark)["kv_cache"] == int(52.66 * (1 << 30))
    assert logs.times_s(one_spark)["profile"] == 2.55
    assert [line for line in logs.kernel_lines(one_spark) if "cudagraph_mode=PIECEWISE" in line]
    two = list(logs.start_messages(lines("vllm-log--kv-cache-fixed-bytes-two-sparks--01.txt")))
    assert logs.kv_cache_tokens(two) == 652_465
    assert logs.kernel_lines(two) == ()  # arguments are no kernels
    named = logs.kernel_lines(
        logs.start_messages(lines("vllm-log--kernel-selection-nvfp4--01.txt"))
    )
    assert [line.split()[1] for line in named] == [
        "FlashInferCutlassNvFp4LinearKernel", "CutlassFP8ScaledMMLinearKernel",
    ]  # fmt: skip
    ended = list(logs.start_messages(lines("vllm-log--startup-complete--01.txt")))
    assert not [line for line in ended if "127.0.0.1" in line]


def test_a_toolkit_is_found_by_what_its_compiler_prints(tmp_path: Path) -> None:
    """The script's own sed, on the output of the real tool in its place."""
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    install_stub(nvcc.parent, "nvcc", f"cat {CAPTURES}/nvcc--version--02.txt")
    toolkits = CudaState().process(run_script(CudaState().command(), nvcc.parent)).toolkits
    assert Toolkit(str(tmp_path), "13.0.88") in toolkits


def test_every_capture_that_is_kept_is_read_by_a_test() -> None:
    tests = Path(__file__).parents[2]
    files = [*tests.rglob("*.py"), *tests.rglob("*.yml")]
    text = "\n".join(path.read_text() for path in files)
    unused = [path.name for path in CAPTURES.glob("*.txt") if path.name not in text]
    assert unused == []
