import dataclasses
import json

import pytest
from spark_vllm.head import choice

HERE = choice.HeadSetup("NVIDIA GB10", "580.95", "0a1b2c3d4e5f", 248320, 3072, (3, 6))
TIMES = {"own": {3: 180.0, 6: 181.0}, "marlin": {3: 212.0, 6: 214.0}, "bf16": {3: 356.0, 6: 361.0}}


def test_head_batches_include_drafts_of_every_sequence():
    assert choice.list_head_batches(4, 2) == (3, 6, 9, 12)
    assert choice.list_head_batches(2, 0) == (1, 2)


def test_fastest_kernel_over_all_batches_is_chosen(tmp_path):
    path = tmp_path / "cache" / "times.json"
    assert choice.save_fastest(path, HERE, TIMES) == "own"
    assert choice.read_choice(path, HERE) == "own"
    slow = {**TIMES, "own": {3: 100.0, 6: 400.0}}
    assert choice.save_fastest(path, HERE, slow) == "marlin"
    assert choice.read_choice(path, HERE) == "marlin"
    assert [entry.name for entry in path.parent.iterdir()] == ["times.json"]


def test_drafts_are_chosen_from_low_and_added_token_ids(tmp_path):
    assert choice.frequent_token_ids(tmp_path, 3, vocabulary=8) == [0, 1, 2]
    added = [{"id": 1}, {"id": 6}, {"id": 9, "content": "beyond the rows of the head"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert choice.frequent_token_ids(tmp_path, 4, vocabulary=8) == [0, 1, 2, 6]
    assert choice.frequent_token_ids(tmp_path, 1, vocabulary=8) == [1, 6]
    assert choice.frequent_token_ids(tmp_path, 99, vocabulary=8) == [*range(8)]


def test_marlin_wins_ties():
    assert (
        choice.select_fastest({"own": {1: 5.0}, "marlin": {1: 5.0}, "bf16": {1: 9.0}}) == "marlin"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA H200"},
        {"driver": "590.10"},
        {"image": "ffffffffffff"},
        {"rows": 124160},
        {"in_features": 2048},
        {"batches": (3, 6, 9)},
    ],
)
def test_measurement_from_a_different_machine_or_shape_is_ignored(tmp_path, change):
    path = tmp_path / "times.json"
    choice.save_fastest(path, HERE, TIMES)
    assert choice.read_choice(path, dataclasses.replace(HERE, **change)) is None


def test_reads_no_choice_without_a_file(tmp_path):
    assert choice.read_choice(tmp_path / "times.json", HERE) is None


@pytest.mark.parametrize(
    "text", ["", "{}", json.dumps({"measured": {"batches": []}, "choice": "x"})]
)
def test_damaged_file_is_rejected_with_a_fix(tmp_path, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="delete the file"):
        choice.read_choice(path, HERE)
