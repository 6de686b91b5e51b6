import json

import pytest
from spark_vllm.head.choice import TABLE_PATH, read_table, tile_for, tiles_for

SHARED_BYTES = {"12.1": 99 * 1024, "default": 48 * 1024, "9.0": 227 * 1024}


def test_every_batch_has_a_tile_on_every_device():
    table = read_table()
    for capability in ((8, 0), (9, 0), (12, 1), (13, 7)):
        tiles = tiles_for(capability, table)
        assert all(tile_for(batch, tiles) in tiles for batch in range(1, 513))


def test_tiles_of_a_table_use_the_same_arithmetic():
    for name, tiles in read_table().items():
        assert len({tile.split for tile in tiles}) == 1, name


def test_unknown_device_uses_the_default_tiles():
    table = read_table()
    assert tiles_for((13, 7), table) == table["default"]
    assert tiles_for((12, 1), table) == table["12.1"]


def test_tiles_in_flight_fit_in_the_shared_memory_of_their_device():
    for name, tiles in read_table().items():
        for tile in tiles:
            weight = tile.block_n * 128
            batch = tile.block_m * 128 * 2
            used = (weight + batch) * tile.groups_per_step * tile.stages
            assert used <= SHARED_BYTES[name], (name, tile)


def test_tiles_of_unmeasured_devices_use_no_hopper_features():
    table = read_table()
    for tile in (*table["default"], *table["12.1"]):
        assert not any((tile.bulk_copies, tile.early, tile.keep_output)), tile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tiles: tiles.pop("default"), "lacks tiles named 'default'"),
        (lambda tiles: tiles["12.1"].clear(), r"limits \[\]; fix: sort them"),
        (lambda tiles: tiles["12.1"].pop(), "fix: sort them"),
        (lambda tiles: tiles["12.1"].reverse(), "fix: sort them"),
        (lambda tiles: tiles["12.1"][0].update(max_batch=None), "fix: sort them"),
        (lambda tiles: tiles["12.1"][0].update(max_batch=16), "fix: sort them"),
    ],
)
def test_incomplete_table_is_rejected(change, message, tmp_path):
    data = json.loads(TABLE_PATH.read_text())
    change(data["tiles"])
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        read_table(path)
