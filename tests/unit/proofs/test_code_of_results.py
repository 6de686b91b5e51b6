"""A result is known by the code it was made with, and is called older once that has changed."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from proofs import code
from proofs.again import WHOLE, again
from spark_deploy.checkout import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "docs"))
from results import KEPT, age

RESULTS = sorted((CHECKOUT / "benchmarks/results").glob("[gc]pu/*.json"))
ON_GPUS = [path for path in RESULTS if path.parent.name == "gpu"]
CASES = "proofs/engine/cases.py"
GPU = CHECKOUT / "benchmarks/results/gpu"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of what results rest on."""
    parts = ("proofs", "lab/model", "files/image", "files/host", "files/contract", "tests/gpu")
    for part in (*parts, "files/checkpoint", "benchmarks/gpu"):
        shutil.copytree(CHECKOUT / part, tmp_path / part)
    return tmp_path


def changed_after(root: Path, edit) -> list[str]:
    before = code.digests("engine-eager", root)
    edit(root / CASES)
    return code.changed("engine-eager", before, root)


def test_another_number_in_the_code_makes_a_result_older(root):
    def edit(path):
        text = path.read_text()
        assert "def mtp(tokens: int)" in text
        path.write_text(text.replace('"method": "mtp"', '"method": "eagle"'))

    assert changed_after(root, edit) == [CASES]


def test_a_module_more_and_one_less_make_it_older(root):
    def add(path):
        (root / "files/image/spark_vllm/more.py").write_text("x = 1\n")
        path.unlink()

    assert changed_after(root, add) == ["files/image/spark_vllm/more.py", CASES]


def test_a_module_that_no_longer_counts_does_not(root):
    before = {**code.digests("engine-eager", root), "proofs/stages.py": "other"}
    assert code.changed("engine-eager", before, root) == []


def test_words_and_layout_do_not(root):
    def edit(path):
        text = path.read_text().replace("def mtp(", "# A remark.\n\n\ndef mtp(", 1)
        path.write_text(text.replace('"""Return one engine run;', '"""Return a run;', 1))

    assert changed_after(root, edit) == []


def test_a_module_of_the_contract_in_another_room_does_not(root):
    shutil.rmtree(root / "files/contract")
    text = "from spark_contract.release import Release\n"
    (root / CASES).write_text(text)
    before = code.digests("engine-eager", root)
    (root / CASES).write_text(text.replace("contract.release", "contract.serving.release"))
    assert code.changed("engine-eager", before, root) == []
    (root / CASES).write_text(text.replace("contract.release", "contract.serving.records"))
    assert code.changed("engine-eager", before, root) == [CASES]


def test_a_newer_python_that_has_more_to_say_of_the_same_code_gives_the_same_digest(
    root, monkeypatch
):
    """3.12 gave functions type parameters; results are made there and read here."""
    before = code.digests("engine-eager", root)
    for kind in (ast.FunctionDef, ast.ClassDef):
        monkeypatch.setattr(kind, "_fields", (*kind._fields, "one_more"))
        monkeypatch.setattr(kind, "one_more", [], raising=False)
    code._of_python.cache_clear()
    assert code.changed("engine-eager", before, root) == []


def test_tables_count_byte_by_byte(root):
    before = code.digests("lm-head", root)
    tiles = root / "files/image/spark_vllm/head/tiles.json"
    tiles.write_text(tiles.read_text().replace('"warps": 2', '"warps": 4', 1))
    assert code.changed("lm-head", before, root) == ["files/image/spark_vllm/head/tiles.json"]


def test_the_page_says_of_a_result_whether_its_code_is_this_code():
    now = code.digests("experts")
    assert age("experts", {"code": now}) == "as here"
    assert age("experts", {"code": dict.fromkeys(now, "0")}).startswith("older: test_experts.py")
    assert "no digests" in age("experts", {})


def test_the_page_has_a_command_and_an_age_for_every_result():
    page = (CHECKOUT / "docs/reference/results.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| [")]
    assert {row[0].partition("]")[0].strip("[") for row in rows} == {path.name for path in RESULTS}
    assert {len(row) for row in rows} == {8}
    kept = [row for row in rows if not row[-1].startswith("`")]
    assert {row[0].partition(".json]")[0].strip("[") for row in kept} == {*KEPT}
    assert {row[-1] for row in kept} <= {"kept as it is"}


def test_what_is_kept_beside_a_newer_run_is_of_the_same_stage_and_not_called_older():
    page = (CHECKOUT / "docs/reference/engine-proofs.md").read_text("utf-8")
    older, _, kept = page.partition("\n<!-- the rest")[0].partition("**Kept on purpose.**")
    for name, newest in KEPT.items():
        one, other = (json.loads((GPU / f"{each}.json").read_text()) for each in (name, newest))
        assert one["stage"] == other["stage"]
        assert one["date"] <= other["date"]
        assert f"[{name}]" in kept
        assert f"[{name}]" not in older


def runs(target: str) -> list[str]:
    """Return what make would run for a target, and for the targets that it calls."""
    asked = {"MAKEFLAGS": "", "SPARK_GPU_RESULTS": "/results", "GPU_PYTHON": "python3"}
    environment = {**os.environ, **asked, "GPU_PYTEST": ""}
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.strip() for line in done.stdout.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("name", [path.stem for path in RESULTS])
def test_every_result_is_made_again_by_a_command_that_knows_it(name):
    way = again(name)
    assert way.words in (CHECKOUT / way.place).read_text("utf-8"), way
    assert way.command in ("make gpu-all", "make cpu-all", "make gpu-train")


@pytest.mark.parametrize(("part", "whole"), WHOLE.items())
def test_the_command_of_a_kind_of_machine_runs_its_parts(part, whole):
    alone = [line for line in runs(part) if "pytest" in line or ".json" in line or " -m " in line]
    assert alone
    assert set(alone) <= set(runs(whole))


def test_no_part_is_without_a_result_and_every_gpu_test_is_run():
    assert {again(path.stem).part for path in RESULTS} == {*WHOLE, "gpu-train"}
    assert "python3 -m pytest tests/gpu" in runs("gpu-all")


def test_times_are_taken_again_by_the_command_that_they_were_taken_by():
    makefile = (
        (CHECKOUT / "Makefile").read_text("utf-8").replace("$(HEAD)", "benchmarks/gpu/lm_head")
    )
    makefile = makefile.replace("$(GPU_PYTHON)", "python3")
    times = [path for path in RESULTS if again(path.stem).part == "gpu-times"]
    assert len(times) > 5
    for path in times:
        found = json.loads(path.read_text("utf-8"))
        line = found["command"]
        if not found["hopper_matrix_instruction"] and "DISABLE" not in line:
            line = f"DISABLE_MMA_V3=1 {line}"  # a variable of the shell, which it cannot know
        assert f"\t{line} --out $(SPARK_GPU_RESULTS)/{path.name}\n" in makefile


def test_every_stage_of_engines_has_a_test_and_a_result():
    """Stages are read and not imported: that needs torch."""
    tree = ast.parse((CHECKOUT / "proofs/stages.py").read_text("utf-8"))
    [table] = [
        node.value for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CASES"
    ]  # fmt: skip
    stages = {key.value for key in table.keys}
    tests = (CHECKOUT / "tests/gpu/test_engine.py").read_text("utf-8")
    assert {*re.findall(r'_failed\("([\w-]+)"', tests)} == stages
    assert {f"engine-{stage}" for stage in stages} <= {path.stem for path in RESULTS}


def test_every_profile_of_front_page_and_ladder_is_served_over_http_by_make_gpu():
    tests = (CHECKOUT / "tests/gpu/test_serve.py").read_text("utf-8")
    served = set(re.findall(r'^    "([\w-]+)": "tiny-', tests, re.M))
    page = (CHECKOUT / "README.md").read_text("utf-8").partition("## Which profile")[2]
    shown = set(re.findall(r"^\| `([\w-]+)` \|", page, re.M))
    files = (CHECKOUT / "catalog/profiles").glob("*.yml")
    stages = {path.stem for path in files if re.search(r"^stage:", path.read_text("utf-8"), re.M)}
    assert len(stages) > 5
    assert shown | stages <= served


def test_a_result_that_no_command_makes_is_named():
    with pytest.raises(ValueError, match="unheard-of: no command makes this result"):
        again("unheard-of")


@pytest.mark.slow
@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_every_result_rests_on_code_that_is_known(path):
    digests = code.digests(path.stem)
    assert digests
    made_with = json.loads(path.read_text("utf-8")).get("code", digests)
    assert all(isinstance(one, str) for one in made_with.values())


def test_the_weights_in_the_tree_are_those_of_the_training_that_is_told_of() -> None:
    told = json.loads((GPU / "recall-training-weights.json").read_text())
    data = (CHECKOUT / "proofs/recall/weights.npz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == told["weights_sha256"]
    assert len(data) < 20e6


def test_the_training_from_nothing_went_on_from_what_it_had_learnt() -> None:
    first, further = (
        json.loads((GPU / f"recall-training{part}.json").read_text()) for part in ("", "-further")
    )
    assert "further_from_sha256" in first
    assert first["further_from_sha256"] is None
    assert further["further_from_sha256"] == first["weights_sha256"]


def test_a_result_rests_on_no_file_that_is_taken_out() -> None:
    rests_on = code.digests("recall-recall")
    assert "proofs/recall/weights.npz" in rests_on
    assert "proofs/recall/training.py" not in rests_on


JUDGED_BY_PROFILES = [
    *("engine-profiles", "engine-steered", "engine-sizes", "engine-names", "engine-long"),
    *("engine-prefixes", "engine-two-gpus", "engine-head-choice"),
]
JUDGE = "proofs/judges/engine.py"


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (JUDGED_BY_PROFILES, [JUDGE, "proofs/judges/experts.py", "proofs/judges/profiles.py"]),
        (["engine-0.30.0", "engine-0.32.0"], [JUDGE, "proofs/judges/answers.py"]),
        (["engine-names"], ["proofs/engine/loaded_names.py"]),
        (["engine-sizes"], ["proofs/engine/transformers_case.py"]),
        (["engine-prefixes"], ["proofs/engine/talk_cases.py", "proofs/judges/talks.py"]),
        (["engine-eager", "recall-recall", "serve-v2"], ["proofs/engine/quick.py"]),
        (["turboquant-layer"], ["proofs/engine/turboquant_slots.py"]),
        (["recall-recall"], ["proofs/trees/build.py", "proofs/recall/verdicts.py"]),
        (["release-plain", "release-seeing"], ["files/host/spark_host/check/comparing.py"]),
        (["release-plain", "release-seeing"], ["files/host/spark_host/check/table.py"]),
        (["engine-quality"], ["proofs/recall/trees.py", "proofs/recall/language.py"]),
        (["engine-eager", "recall-recall", "requantize"], ["lab/model/original.py"]),
        (["engine-eager", "serve-v2", "requantize"], ["lab/model/weights.npz"]),
        (["marlin-atomic-add"], ["benchmarks/gpu/timing.py"]),
    ],
)
def test_a_result_rests_on_what_ran_and_judged_and_on_what_that_imports(names, modules) -> None:
    for name in names:
        assert {*modules} <= {*code.digests(name)}, name


@pytest.mark.parametrize("name", [path.stem for path in RESULTS])
def test_no_import_of_this_repository_is_left_out_unless_the_table_says_so(name: str) -> None:
    """Found here another way than there: by every name that is a file of this repository."""
    kind = next(kind for kind in code.RAN if name.startswith(kind))
    said = [*code.NEVER, *(one[1:] for one in code.RAN[kind] if one.startswith("!"))]
    rests_on = code.digests(name)
    for path in (one for one in rests_on if one.endswith(".py")):
        for place in _imported_files((CHECKOUT / path).parent, CHECKOUT / path):
            left_out = any(place.match(one) or fnmatch(str(place), one) for one in said)
            assert str(place) in rests_on or left_out, (path, place)


def _imported_files(here: Path, module: Path) -> set[Path]:
    rooms = (CHECKOUT, here, *(one for one in (CHECKOUT / "files").iterdir() if one.is_dir()))
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{one.name}" for one in node.names)}
    files = {room / f"{name.replace('.', '/')}.py" for room in rooms for name in names}
    return {one.relative_to(CHECKOUT) for one in files if one.is_file()}


def older_after(root: Path, *paths: str) -> set[str]:
    """Return the results that changed modules make older."""
    names = [one.stem for one in RESULTS]
    before = {name: code.digests(name, root) for name in names}
    for path in paths:
        (root / path).write_text((root / path).read_text() + "\nMORE = 1\n")
    return {name for name in names if code.changed(name, before[name], root)}


@pytest.mark.slow
def test_a_changed_judge_makes_its_own_results_older_and_no_others(root) -> None:
    engines = {one.stem for one in RESULTS if one.stem.startswith("engine-")}
    assert older_after(root, "proofs/judges/quality.py") == {"engine-quality"}
    assert older_after(root, "proofs/drafts/judge.py") == {"engine-profiles", "dflash"}
    shared = {"steered", "prefixes", "sizes"}
    assert older_after(root, JUDGE) == engines - {"engine-quality"} | shared
    assert older_after(root, "proofs/judges/profiles.py") == {
        *JUDGED_BY_PROFILES,
        *shared,
    }
    recall = {one.stem for one in RESULTS if re.match(r"recall-(?!training|formats)", one.stem)}
    assert older_after(root, "proofs/recall/verdicts.py") == recall
    assert older_after(root, "proofs/serve/long.py") == {"serve-v2-long"}


def test_what_only_writes_results_down_makes_none_older(root) -> None:
    writers = ("again", "code", "failed", "recorded", "stages")
    assert older_after(root, *(f"proofs/{name}.py" for name in writers)) == set()


def test_a_module_that_an_entry_begins_to_import_counts_from_then_on(root) -> None:
    def edit(path):
        (root / "proofs/engine/newer.py").write_text("x = 1\n")
        path.write_text(path.read_text() + "\ndef f():\n    from proofs.engine import newer\n")

    assert changed_after(root, edit) == [CASES, "proofs/engine/newer.py"]


@pytest.mark.slow
def test_a_race_or_a_training_makes_no_recall_result_older(root) -> None:
    trained = {"recall-training", "recall-training-further", "recall-training-weights"}
    assert older_after(root, "proofs/recall/race.py") == trained
    assert older_after(root, "proofs/recall/training.py") == trained
