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


def test_draft_vocabulary_contains_low_token_ids_and_added_token_ids(tmp_path):
    assert choice.frequent_token_ids(tmp_path, 3, vocabulary=8) == [0, 1, 2]
    added = [{"id": 1}, {"id": 6}, {"id": 9, "content": "beyond the rows of the head"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert choice.frequent_token_ids(tmp_path, 4, vocabulary=8) == [0, 1, 2, 6]
    assert choice.frequent_token_ids(tmp_path, 1, vocabulary=8) == [1, 6]
    assert choice.frequent_token_ids(tmp_path, 99, vocabulary=8) == [*range(8)]


def test_token_ids_read_from_a_file_keep_their_order(tmp_path):
    path = tmp_path / "token_ids.json"
    path.write_text("[5, 0, 7]")
    assert choice.read_token_ids(path, 3, vocabulary=8) == [5, 0, 7]
    path.write_text("[2, 0, 1]")
    assert choice.read_token_ids(path, 64, vocabulary=3) == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (None, 3),
        ("", 3),
        ("[5, 0", 3),
        ('{"5": 0}', 1),
        ("[5, 0, 7.0]", 3),
        ("[5, 0, true]", 3),
        ("[5, 0, 8]", 3),
        ("[5, 0, -1]", 3),
        ("[5, 0, 5]", 3),
        ("[5, 0]", 3),
        ("[5, 0, 7]", 2),
        ("[]", 1),
    ],
)
def test_rejects_missing_or_damaged_token_id_files(tmp_path, text, count):
    path = tmp_path / "token_ids.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=str(path)):
        choice.read_token_ids(path, count, vocabulary=8)


def test_marlin_is_chosen_if_kernels_are_equally_fast():
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


def test_no_kernel_is_chosen_without_a_measurement_file(tmp_path):
    assert choice.read_choice(tmp_path / "times.json", HERE) is None


@pytest.mark.parametrize(
    "text", ["", "{}", json.dumps({"measured": {"batches": []}, "choice": "x"})]
)
def test_damaged_measurement_file_is_rejected_and_the_error_suggests_a_fix(tmp_path, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="delete the file"):
        choice.read_choice(path, HERE)


SHARED_BYTES = {"12.1": 99 * 1024, "default": 48 * 1024, "9.0": 227 * 1024}


def test_every_batch_size_has_a_tile_on_every_device():
    table = choice.read_table()
    for capability in ((8, 0), (9, 0), (12, 1), (13, 7)):
        tiles = choice.tiles_for(capability, table)
        assert all(choice.tile_for(batch, tiles) in tiles for batch in range(1, 513))


def test_batch_limits_of_tiles_increase_and_the_last_tile_has_none():
    for name, tiles in choice.read_table().items():
        *limits, last = [tile.max_batch for tile in tiles]
        assert last is None, name
        assert limits == sorted(set(limits)), name


def test_all_tiles_in_a_table_use_the_same_arithmetic():
    for name, tiles in choice.read_table().items():
        assert len({tile.split for tile in tiles}) == 1, name


def test_unknown_device_uses_the_default_tiles():
    table = choice.read_table()
    assert choice.tiles_for((13, 7), table) == table["default"]
    assert choice.tiles_for((12, 1), table) == table["12.1"]


def test_tiles_in_flight_fit_in_the_shared_memory_of_their_device():
    for name, tiles in choice.read_table().items():
        for tile in tiles:
            weight = tile.block_n * 128
            batch = tile.block_m * 128 * 2
            used = (weight + batch) * tile.groups_per_step * tile.stages
            assert used <= SHARED_BYTES[name], (name, tile)


def test_tiles_of_unmeasured_devices_use_no_hopper_features():
    table = choice.read_table()
    for tile in (*table["default"], *table["12.1"]):
        assert not any((tile.bulk_copies, tile.early, tile.keep_output)), tile
