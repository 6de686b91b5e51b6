"""Tables that the builder writes and the plugin reads, against sums in plain Python."""

import random
import zlib

import numpy as np
import pytest
from spark_checkpoint import ValidationError
from spark_checkpoint.build.ngram_table import find_tables, table_tensors
from spark_checkpoint.directory import read_checkpoint
from spark_checkpoint.progress import Progress
from spark_vllm.ngram_table import (
    BLOCK_BYTES,
    DamagedTableError,
    Table,
    compute_next_ids,
    read_table_options,
    table_path,
)

from lab.model import rounding
from lab.model.rounding import Tensor
from lab.model.safetensors import write_file

NAME = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
ROWS, WIDTH, PARTS = 1000, 160, 3
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def e4m3(code):
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    power = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa * 2.0**-9
    return sign * power


def decode(row, number_format, scale):
    if number_format == "e4m3":
        return [e4m3(int(code)) * scale for code in row]
    numbers = []
    for place in range(WIDTH):
        code = int(row[place // 2]) >> 4 * (place % 2) & 15
        factor = e4m3(int(row[WIDTH // 2 + place // 16])) * scale
        numbers.append((-1 if code & 8 else 1) * E2M1[code & 7] * factor)
    return numbers


def rows_of_numbers():
    source = np.random.default_rng(4)
    sizes = 10.0 ** source.uniform(-3, 2, (ROWS, 1))
    return (source.normal(0, 1, (ROWS, WIDTH)) * sizes).astype(np.float32)


def shards(rows):
    size = -(-len(rows) // PARTS)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def write_base(directory, tensors):
    directory.mkdir(exist_ok=True)
    write_file(directory / "model.safetensors", tensors)
    return read_checkpoint(directory)


def write_bf16(directory, rows):
    parts = enumerate(shards(rows))
    return write_base(directory, {f"{NAME}.shard_{n}.weight": rounding.bf16(p) for n, p in parts})


def write_fp8(directory, codes, scale, change=dict):
    tensors = {
        f"{NAME}.shard_{number}.weight": Tensor("F8_E4M3", part.shape, part.tobytes())
        for number, part in enumerate(shards(codes))
    }
    tensors[f"{NAME}.weight_scale"] = rounding.float32(np.array([scale], np.float32))
    change(tensors)
    return write_base(directory, tensors)


def convert(base, out, number_format="e2m1"):
    (table,) = find_tables(base, number_format)
    out.mkdir()
    table.write(out, Progress())
    return table_path(out, 1)


@pytest.fixture
def table_file(tmp_path):
    return convert(write_bf16(tmp_path / "base", rows_of_numbers()), tmp_path / "out")


def read(path, ids, cache_bytes=1 << 16, **more):
    table = Table(path, cache_bytes, **more)
    out = np.empty((len(ids), table.header.row_bytes), np.uint8)
    table.lookup(np.array(ids, np.int64), out)
    return table, out


def test_quantized_rows_are_close_to_published_rows(table_file):
    rows, ids = rows_of_numbers(), [0, 44, 45, 999, 333, 334, 667]
    table, out = read(table_file, ids)
    for row, number in zip(out, ids, strict=True):
        numbers = np.array(decode(row, "e2m1", table.header.scale))
        assert np.linalg.norm(numbers - rows[number]) < 0.13 * np.linalg.norm(rows[number])


def test_keeps_fp8_and_nvfp4_rows_unchanged(tmp_path):
    codes = np.random.default_rng(1).integers(0, 0x7F, (ROWS, WIDTH)).astype(np.uint8)
    path = convert(write_fp8(tmp_path / "fp8", codes, 0.25), tmp_path / "a", "e4m3")
    table, out = read(path, [5, 700])
    assert (out == codes[[5, 700]]).all()
    assert table.header.scale == 0.25
    packed = np.random.default_rng(2).integers(0, 256, (ROWS, 80)).astype(np.uint8)
    scales = codes[:, :10]
    tensors = {f"{NAME}.weight_scale_2": rounding.float32(np.array(0.5, np.float32))}
    for number, (part, factors) in enumerate(zip(shards(packed), shards(scales), strict=True)):
        name = f"{NAME}.shard_{number}.weight"
        tensors[name] = Tensor("U8", part.shape, part.tobytes())
        tensors[f"{name}_scale"] = Tensor("F8_E4M3", factors.shape, factors.tobytes())
    base = write_base(tmp_path / "nvfp4", tensors)
    table, out = read(convert(base, tmp_path / "b"), [999, 1])
    assert (out == np.concatenate([packed, scales], axis=1)[[999, 1]]).all()
    assert table.header.scale == 0.5
    assert set(table_tensors(base)) == set(tensors)


def test_requantized_fp8_rows_are_close_to_the_originals(tmp_path):
    codes = np.random.default_rng(1).integers(0, 0x7F, (ROWS, WIDTH)).astype(np.uint8)
    path = convert(write_fp8(tmp_path / "fp8", codes, 0.25), tmp_path / "a")
    table, out = read(path, [7])
    numbers = np.array(decode(out[0], "e2m1", table.header.scale))
    published = np.array(decode(codes[7], "e4m3", 0.25))
    assert np.linalg.norm(numbers - published) < 0.13 * np.linalg.norm(published)


def test_cached_rows_equal_rows_from_the_file(table_file):
    source = random.Random(8)
    ids = [source.randrange(ROWS) for _ in range(4000)]
    _, expected = read(table_file, ids)
    table = Table(table_file, cache_bytes=100 * 98)
    for start in range(0, len(ids), 37):
        part = np.array(ids[start : start + 37], np.int64)
        out = np.empty((len(part), 90), np.uint8)
        table.lookup(part, out)
        assert (out == expected[start : start + 37]).all()
    assert table.rows_read == 4000
    assert 0 < table.cache_hits < 4000


def test_cache_never_exceeds_its_byte_limit(table_file):
    table = Table(table_file, cache_bytes=9800)
    assert table._cached_rows.nbytes + table._cached_ids.nbytes <= 9800


@pytest.mark.parametrize("block", [1, 12, 23])
def test_first_read_of_a_damaged_block_fails(table_file, block):
    content = bytearray(table_file.read_bytes())
    content[block * 4096 + 4000] ^= 4
    table_file.write_bytes(content)
    row = (block - 1) * 45
    read(table_file, [(row + 45) % ROWS])  # another block
    with pytest.raises(DamagedTableError, match=f"block {block} is damaged"):
        read(table_file, [row])


def test_misplaced_block_is_reported_as_damaged(table_file):
    content = bytearray(table_file.read_bytes())
    content[4096:8192], content[8192:12288] = content[8192:12288], content[4096:8192]
    table_file.write_bytes(content)
    with pytest.raises(DamagedTableError, match="block 2 is damaged"):
        read(table_file, [45])


def test_truncated_and_missing_files_are_rejected(table_file):
    content = table_file.read_bytes()
    for size in (0, 4095, 4096, len(content) - 1):
        table_file.write_bytes(content[:size])
        with pytest.raises(DamagedTableError, match="fix: run `spark_checkpoint verify"):
            Table(table_file, 4096)
    table_file.unlink()
    with pytest.raises(DamagedTableError, match="cannot be read"):
        Table(table_file, 4096)


def test_reading_a_file_that_shrinks_fails(table_file):
    table = Table(table_file, 4096)
    with table_file.open("r+b") as file:
        file.truncate(8192)
    with pytest.raises(DamagedTableError, match="block 23 is missing"):
        table.lookup(np.array([999]), np.empty((1, 90), np.uint8))


def test_disk_read_error_raises_an_error(table_file):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with pytest.raises(DamagedTableError, match="Input/output error"):
        read(table_file, [3], read=fail)


@pytest.mark.parametrize("row", [-1, ROWS])
def test_row_outside_the_table_raises_an_error(table_file, row):
    with pytest.raises(DamagedTableError, match="1000 rows"):
        read(table_file, [5, row])


def test_each_block_is_verified_only_once(table_file, monkeypatch):
    table, _ = read(table_file, [0], cache_bytes=98)
    calls = []
    own = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda *a: calls.append(a) or own(*a))
    table.lookup(np.array([1]), np.empty((1, 90), np.uint8))
    assert not calls
    table.lookup(np.array([45]), np.empty((1, 90), np.uint8))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(f"{NAME}.shard_1.weight"), "shard_1 of"),
        (lambda t: t.pop(f"{NAME}.weight_scale"), "is missing"),
        (lambda t: t.update({f"{NAME}.weight_scale": rounding.float32(np.zeros(1))}), "positive"),
        (dict, "NaN"),
    ],
)
def test_incomplete_or_damaged_sources_are_rejected(tmp_path, change, match):
    codes = np.ones((ROWS, WIDTH), np.uint8)
    codes[600, 3] = 0xFF if match == "NaN" else 1
    with pytest.raises(ValidationError, match=match):
        convert(write_fp8(tmp_path / "base", codes, 1.0, change), tmp_path / "out")


def fp8_zeros(*shape):
    return Tensor("F8_E4M3", shape, bytes(int(np.prod(shape))))


def packed_parts(scale):
    return {
        f"{NAME}.shard_0.weight": Tensor("U8", (4, WIDTH // 2), bytes(2 * WIDTH)),
        f"{NAME}.shard_0.weight_scale": scale,
        f"{NAME}.weight_scale_2": rounding.float32(np.ones(1, np.float32)),
    }


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (
            packed_parts(fp8_zeros(4, WIDTH // 32)),
            r"is F8_E4M3 \[4, 5\], expected F8_E4M3 \[4, 10\]",
        ),
        (packed_parts(Tensor("I8", (4, 10), bytes(40))), "is I8"),
        (dict(list(packed_parts(fp8_zeros(4, 10)).items())[:1]), "weight_scale: is missing"),
        (
            {f"{NAME}.shard_{n}.weight": fp8_zeros(4, width) for n, width in enumerate((160, 80))},
            r"shard_1.weight: is F8_E4M3 \[4, 80\], expected F8_E4M3 \[4, 160\]",
        ),
        ({f"{NAME}.shard_0.weight": fp8_zeros(4, 150)}, "multiple of 16"),
        ({f"{NAME}.shard_0.weight": fp8_zeros(4, 8000)}, "rows of 4500 bytes"),
        ({f"{NAME}.shard_0.weight": fp8_zeros(4)}, "expected a matrix"),
    ],
)
def test_tables_that_do_not_fit_the_format_are_rejected(tmp_path, tensors, match):
    with pytest.raises(ValidationError, match=match):
        convert(write_base(tmp_path / "base", tensors), tmp_path / "out")


@pytest.mark.parametrize(
    ("spark", "has_file", "match"),
    [
        ({"ngram_table": "file"}, False, "lacks ngram-table"),
        ({}, True, "has ngram-table"),
        ({"ngram_table": "disk"}, True, 'expected "file"'),
        ({"ngram_table": "file", "ngram_cache_mib": 0}, True, "expected at least 1 MiB"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_rejected(tmp_path, spark, has_file, match):
    if has_file:
        table_path(tmp_path, 1).touch()
    with pytest.raises(ValueError, match=match):
        read_table_options({"spark": spark}, tmp_path)


def test_reads_directory_and_cache_size_from_ngram_options(tmp_path):
    assert read_table_options({"spark": {"lm_head": "int8-triton"}}, tmp_path) is None
    table_path(tmp_path, 1).touch()
    options = read_table_options({"spark": {"ngram_table": "file", "ngram_cache_mib": 7}}, tmp_path)
    assert options.cache_bytes == 7 << 20


SIZES, OFFSETS = [101, 103, 107, 109], [0, 101, 204, 311]
MULTIPLIERS = [(1 << 63) // 1000 - 7, 12345678901234567, 987654321987654321]


def ids_of(tokens, place):
    """The engine's formula for two heads of two tokens and two heads of three."""
    ids = []
    for head, (size, offset) in enumerate(zip(SIZES, OFFSETS, strict=True)):
        mixed = 0
        for shift in range(2 + head // 2):
            mixed ^= tokens[place - shift] * MULTIPLIERS[shift]
        signed = (mixed + (1 << 63)) % (1 << 64) - (1 << 63)  # products overflow like int64
        ids.append(signed % size + offset)
    return ids


@pytest.mark.parametrize(
    ("start", "end", "following"),
    [(0, 8, range(8, 16)), (8, 16, range(16, 20)), (0, 1, ()), (1, 4, range(4, 7)), (16, 20, ())],
)
def test_rows_for_the_next_part_of_the_prompt_are_requested(
    table_file, monkeypatch, start, end, following
):
    table = Table(table_file, 1 << 16)
    prompt = np.random.default_rng(5).integers(0, 1000, 20)
    requested = []
    monkeypatch.setattr("os.posix_fadvise", lambda _, offset, *more: requested.append(offset))
    parts = [np.array(values) for values in (MULTIPLIERS, SIZES, OFFSETS)]
    table.request(compute_next_ids(prompt, start, end, *parts))
    rows = {row for place in following for row in ids_of(prompt.tolist(), place)}
    blocks = {row // table.header.rows_per_block + 1 for row in rows}
    assert requested == [BLOCK_BYTES * block for block in sorted(blocks)]
