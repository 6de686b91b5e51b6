import ast
import functools
import hashlib
import json
import os
import re
import subprocess

import pytest

from proofs.result_files import find_kind
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT

FOLDER = CHECKOUT / "proofs/results"
RESULTS = sorted(FOLDER.glob("[gc]pu/*.json"))
GPU = FOLDER / "gpu"
WHOLE = {
    "gpu-all": ("gpu", "gpu-repeats", "gpu-times"),
    "cpu-all": ("cpu-proofs", "cpu-sizes", "cpu-seeing", "cpu-models", "cpu-tools"),
}
"""Make targets by the target that runs them all."""


def commands(target):
    environment = {**os.environ, "MAKEFLAGS": "", "GPU_PYTEST": ""}
    arguments = ["SPARK_GPU_RESULTS=/results", "GPU_PYTHON=python3", target]
    result = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *arguments],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.strip() for line in result.stdout.replace("\\\n", " ").splitlines()]


def test_every_result_file_records_its_origin_and_has_a_make_target():
    targets = {"gpu-train", "backends", *WHOLE["gpu-all"], *WHOLE["cpu-all"]}
    for path in RESULTS:
        result = json.loads(path.read_text("utf-8"))
        origin = [result.get(key) for key in ("command", "date", "commit", "device", "versions")]
        assert all(origin), path
        assert find_kind(path.stem).target in targets, path


@pytest.mark.parametrize(("whole", "parts"), WHOLE.items())
def test_gpu_all_and_cpu_all_include_every_gpu_and_cpu_target(whole, parts):
    run = set(commands(whole))
    for part in parts:
        fragments = ("pytest", ".json", " -m ")
        own = {line for line in commands(part) if any(text in line for text in fragments)}
        assert own, part
        assert own <= run, part


def test_lm_head_timings_record_their_command():
    lines = commands("gpu-times")
    times = [path for path in RESULTS if find_kind(path.stem).target == "gpu-times"]
    assert len(times) > 5
    for path in times:
        result = json.loads(path.read_text("utf-8"))
        command = result["command"]
        if not result.get("hopper_matrix_instruction", True) and "DISABLE" not in command:
            command = f"DISABLE_MMA_V3=1 {command}"
        name = path.name.replace("-h100", "")  # of a second device
        assert f"{command} --out /results/{name}" in lines


def test_every_engine_stage_has_a_gpu_test_and_a_result_file():
    """Stages are parsed, not imported: their module needs torch."""
    tree = ast.parse((CHECKOUT / "proofs/stages.py").read_text("utf-8"))
    [table] = [
        node.value for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CASES"
    ]  # fmt: skip
    assert isinstance(table, ast.Dict)
    stages = {key.value for key in table.keys if isinstance(key, ast.Constant)}
    tests = (CHECKOUT / "tests/gpu/test_engine.py").read_text("utf-8")
    assert {*re.findall(r'^    "([\w-]+)": \d+,$', tests, re.M)} == stages
    assert {f"engine-{stage}" for stage in stages} <= {path.stem for path in RESULTS}


def test_make_gpu_serves_every_profile_that_has_a_stage():
    tests = (CHECKOUT / "tests/gpu/test_serve.py").read_text("utf-8")
    served = set(re.findall(r'^    "([\w-]+)": "tiny-', tests, re.M))
    files = (CHECKOUT / "catalog/profiles").glob("*.yml")
    stages = {path.stem for path in files if re.search(r"^stage:", path.read_text("utf-8"), re.M)}
    assert len(stages) > 5
    assert stages <= served


def test_recall_weights_match_the_recorded_training_result():
    recorded = json.loads((GPU / "recall-training-weights.json").read_text())
    data = (CHECKOUT / "proofs/recall/weights.npz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == recorded["weights_sha256"]


CATALOG = read_catalog()
QUOTED = [
    *(
        (name, row.what, row.result)
        for name in CATALOG.profile_names
        for row in CATALOG.profile(name, "qwen3.5-122b").proven
    ),
    *(
        (rail.rule, f"{rail.reason} {rail.source}", rail.source)
        for rail in CATALOG.rails
        if rail.evidence == "measured"
    ),
]
"""Quotes of result files in profiles and measured guard rails: name, text, source."""
FIGURE = re.compile(r"(?<![\w.#])\d[\d,]*(?:\.\d+)?(?!\w)(?: ?%)?")
FILE = re.compile(r"[\w.-]+\.json")
SMALL = 20  # numbers of layers, drafts and requests
SAMPLES = 30
"""Longer lists are raw samples, which would match any figure."""


def leaves(value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list):
        yield len(value)
        for item in value if len(value) < SAMPLES else ():
            yield from leaves(item)
    else:
        yield value


@functools.cache
def numbers(name):
    [path] = FOLDER.rglob(name)
    texts = (str(leaf) for leaf in leaves(json.loads(path.read_text("utf-8"))))
    matches = (re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text) for text in texts)
    return {float(number.replace(",", "")) for group in matches for number in group}


def unsupported(text, files):
    known = set[float]().union(*map(numbers, files))
    plain = re.sub(r"vLLM 0\.\d+|\b\d+\.\d+\.\d+\b|`[^`]*`", "", text)
    return [figure for figure in FIGURE.findall(plain) if not supported(figure, known)]


def supported(figure, known):
    plain = figure.rstrip(" %").replace(",", "")
    value, places = float(plain), len(plain.partition(".")[2])
    if value <= SMALL and "." not in plain:
        return True
    half = 0.5 * 10**-places + 1e-9
    scales = (1.0, 100.0, 1e3, 1e6, 1e-6)
    return any(
        abs(number * scale - value) <= half or abs((1 - number) * scale - value) <= half
        for number in known
        for scale in scales
    )


def test_figures_and_device_quoted_in_the_catalog_match_the_result_files():
    assert len(QUOTED) > 50
    for name, text, source in QUOTED:
        files = [file for file in FILE.findall(source) if (GPU / file).exists()]
        assert not files or unsupported(text, files) == [], name
        devices = {json.loads((GPU / file).read_text())["device"] for file in files}
        for device in set(re.findall(r"\b(H100|H200)\b", text)) if files else ():
            assert any(device in known for known in devices), name


def test_figure_missing_from_its_result_file_is_detected():
    assert unsupported("the tokens stand still for 1.1 s", ["serve-v2-long.json"]) == ["1.1"]
