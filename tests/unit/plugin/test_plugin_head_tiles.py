from spark_vllm.head.choice import read_table, tile_for, tiles_for

SHARED_BYTES = {"12.1": 99 * 1024, "default": 48 * 1024, "9.0": 227 * 1024}


def test_every_batch_has_a_tile_on_every_device():
    table = read_table()
    for capability in ((8, 0), (9, 0), (12, 1), (13, 7)):
        tiles = tiles_for(capability, table)
        assert all(tile_for(batch, tiles) in tiles for batch in range(1, 513))


def test_limits_of_the_tiles_rise_and_only_the_last_has_none():
    for name, tiles in read_table().items():
        *limits, last = [tile.max_batch for tile in tiles]
        assert last is None, name
        assert limits == sorted(set(limits)), name


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
