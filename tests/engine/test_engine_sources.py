import ast
import re
from pathlib import Path

import pytest
from engine_mutants import Mutant, mutations
from spark_vllm import SUPPORTED_ENGINES
from spark_vllm.check.rules import TABLE, Sources, check_table, rows_for
from wheel_sources import RELEASES, fetch

from lab.engine.patch import ENGINE_VERSION

PLUGIN = Path(__file__).parents[2] / "files/image/spark_vllm"
FILES = {file for row in TABLE for file in Sources.files(row.symbol.partition(":")[0])}


def released(version):
    return fetch(version, FILES)


def test_every_supported_engine_has_recorded_sources():
    assert set(RELEASES) == set(SUPPORTED_ENGINES)


def test_lab_engine_is_supported():
    assert ENGINE_VERSION in SUPPORTED_ENGINES


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_released_engine_meets_every_requirement_of_the_plugin(version):
    assert check_table(Sources(released(version)), version) == []


@pytest.mark.parametrize("version", SUPPORTED_ENGINES)
def test_engine_installs_the_packages_the_plugin_needs(version):
    about = f"{RELEASES[version].project.replace('-', '_')}-{version}.dist-info/METADATA"
    text = (fetch(version, {about}) / about).read_text()
    required = {name.lower() for name in re.findall(r"^Requires-Dist: ([\w-]+)", text, re.M)}
    assert {"torch", "safetensors", "transformers", "pyyaml"} <= required


def engine_imports(tree):
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }


def test_requirements_list_every_engine_import_of_the_plugin():
    imported = set()
    for path in PLUGIN.rglob("*.py"):
        imported |= set(engine_imports(ast.parse(path.read_text())).values())
    assert imported - {row.symbol for row in TABLE} == set()


NEW_METHODS = {
    "Int8Head._choose_kernel",
    "FileEmbedding._wait_for_rows",
    "FileEmbedding._host_function",
    "ReadAheadState._request",
}


def test_requirements_list_every_overridden_engine_method():
    listed = {tuple(row.symbol.rpartition(":")[2].split(".")[-2:]) for row in TABLE}
    methods = {names[-1] for names in listed}
    missing = []
    for path in PLUGIN.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = engine_imports(tree)
        for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)} & set(imported)
            for item in node.body:
                if not bases or not isinstance(item, ast.FunctionDef):
                    continue
                name = f"{node.name}.{item.name}"
                if item.name == "__init__":
                    calls = "super().__init__" in ast.unparse(item)
                    known = not calls or any((base, "__init__") in listed for base in bases)
                else:
                    known = item.name in methods
                if not known and name not in NEW_METHODS:
                    missing.append(name)
    assert missing == []


def test_requirements_list_every_batch_field_that_the_plugin_reads():
    text = (PLUGIN / "turboquant.py").read_text()
    read = {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("metadata", "attn_metadata")
    }
    read |= {
        word.arg
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "replace"
        for word in node.keywords
        if word.arg
    }
    rows = {row.symbol.rpartition("TurboQuantMetadata.")[2] for row in TABLE}
    assert {"seq_lens", "block_table", "is_prefill"} <= read
    assert read - rows == set()


def test_requirements_refer_to_existing_plugin_files():
    for row in TABLE:
        places = (PLUGIN / row.used_by, PLUGIN.parent / row.used_by)
        assert any(path.is_file() for path in places), row


MUTANTS = [
    pytest.param(version, row, mutate, id=f"{version}-{row.symbol.rpartition('.')[2]}-{label}")
    for version in SUPPORTED_ENGINES
    for row in rows_for(version)
    for label, mutate in mutations(row)
]


@pytest.mark.parametrize(("version", "row", "mutate"), MUTANTS)
def test_check_rejects_an_engine_that_violates_a_requirement(version, row, mutate):
    root = released(version)
    mutant = Mutant(root, row)
    mutate(mutant)
    problems = list(row.problems(mutant.sources(root)))
    assert problems, f"{row.symbol} may change unnoticed"
    for problem in problems:
        assert problem.startswith(f"{row.symbol}: ")
        assert row.reason in problem
        assert problem.endswith(row.used_by)


def test_every_requirement_has_a_test_with_a_modified_engine():
    assert {id(row) for row in TABLE} == {id(param.values[1]) for param in MUTANTS}
