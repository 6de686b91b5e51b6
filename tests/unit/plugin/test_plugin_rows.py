import re
from pathlib import Path
from textwrap import indent

import pytest
import yaml
from spark_vllm import SUPPORTED_ENGINES
from spark_vllm.check import rules

IMAGE = Path(__file__).parents[3] / "files" / "image"
REASON = "reason: the loader calls it"
RULES = {
    "exists": rules.Exists(),
    "absent": rules.Absent(),
    "{takes: []}": rules.Takes(),
    "{takes: [a, b], keywords: [c], decorator: classmethod}": rules.Takes(
        ("a", "b"), ("c",), "classmethod"
    ),
    "{inherits: Base}": rules.Inherits("Base"),
    "{contains: text}": rules.Contains("text"),
    "{maps: {a.: null, b: [c, d]}}": rules.Maps((("a.", None), ("b", ["c", "d"]))),
    "{does: ['f(a, b)', c]}": rules.Does(("f(a, b)", "c")),
    "{does_not: [f]}": rules.Does(("f",), expected=False),
}


def written(path, rows, names="{base: 'vllm.a:B'}"):
    path.write_text(f"names: {names}\nrows:\n register.py:\n{indent(rows, ' ')}\n")
    return path


@pytest.mark.parametrize("requirement", RULES)
def test_parses_every_kind_of_engine_requirement(tmp_path, requirement):
    rows = f"- symbol: $base.c\n  requires: {requirement}\n  {REASON}"
    read = rules.read_rows(written(tmp_path / "rows.yml", rows))
    expected = rules.Row(
        "vllm.a:B.c", RULES[requirement], "the loader calls it", "register.py", SUPPORTED_ENGINES
    )
    assert read == (expected,)


def test_requirement_rows_can_list_versions_and_refer_to_named_values(tmp_path):
    rows = f"- symbol: $b\n  requires: exists\n  {REASON}\n  versions: [{SUPPORTED_ENGINES[1]}]"
    [row] = rules.read_rows(written(tmp_path / "rows.yml", rows, "{a: vllm.a, b: '$a:B'}"))
    assert (row.symbol, row.versions) == ("vllm.a:B", (SUPPORTED_ENGINES[1],))


WRONG = {
    "unknown rule": ("requires: {tekes: [a]}", "keys exists, absent"),
    "two rules": ("requires: {does: [a], contains: b}", "keys exists, absent"),
    "rule without a value": ("requires: does", "keys exists, absent"),
    "empty list": ("requires: {does: []}", "keys exists, absent"),
    "string instead of a list": ("requires: {does: a}", "keys exists, absent"),
    "string of parameters": ("requires: {takes: a}", "a list of strings"),
    "string of keywords": ("requires: {takes: [a], keywords: bc}", "a list of strings"),
    "unknown decorator": ("requires: {takes: [], decorator: cached}", "keys exists, absent"),
    "unknown key of a requirement": ("requires: {takes: [], keyword: [a]}", "of the keys exists"),
    "no requirement": ("", "the keys symbol, requires, reason"),
    "unknown key": ("requires: exists\n  version: [0.30.0]", "the keys symbol, requires"),
    "unsupported engine": ("requires: exists\n  versions: [0.1.0]", "versions (from 0.30.0"),
    "no engine": ("requires: exists\n  versions: []", "versions (from 0.30.0"),
    "number as versions": ("requires: exists\n  versions: 0.30", "not iterable"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rejects_an_invalid_requirement_row(tmp_path, case):
    text, words = WRONG[case]
    path = written(tmp_path / "rows.yml", f"- symbol: $base.c\n  {text}\n  {REASON}")
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        rules.read_rows(path)
    assert str(error.value).startswith(f"{path}: register.py: row 1: ")
    assert "$base.c" in str(error.value)
    assert "fix: " in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("requires: exists\n  requires: absent", "duplicate key"), ("requires: {", "while parsing")],
)
def test_rejects_duplicate_key_and_invalid_yaml(tmp_path, text, words):
    with pytest.raises(ValueError, match=f"rows.yml: (.|\n)*{words}(.|\n)*line [45]"):
        rules.read_rows(written(tmp_path / "rows.yml", f"- symbol: a:b\n  {text}\n  {REASON}"))


def test_rejects_unknown_names_and_keys_in_requirement_rows(tmp_path):
    row = f"- symbol: $bace.c\n  requires: exists\n  {REASON}"
    with pytest.raises(ValueError, match=r"row 1: .*\$bace\.c.*: unknown name .*, expected base"):
        rules.read_rows(written(tmp_path / "rows.yml", row))
    with pytest.raises(ValueError, match="expected the keys names and rows"):
        rules.read_rows(written(tmp_path / "rows.yml", row, "{base: vllm}\nmore: 1"))


@pytest.mark.slow
def test_requirement_table_contains_every_file():
    files = sorted((IMAGE / "spark_vllm/check").glob("*.yml"))
    tables = [yaml.safe_load(path.read_text())["rows"] for path in files]
    stated = [row for by_file in tables for rows in by_file.values() for row in rows]
    assert len(stated) == len(rules.TABLE) > 100
    assert {row["reason"] for row in stated} == {row.reason for row in rules.TABLE}
