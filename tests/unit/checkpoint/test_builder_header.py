"""The header reader and writer against the safetensors package, and hostile files."""

import json

import numpy as np
import pytest
from builder_shards import SERIAL
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, TensorSpec, deserialize, serialize
from spark_checkpoint.errors import HeaderRefused
from spark_checkpoint.headers import (
    DTYPE_BITS,
    HEADER_LIMIT_BYTES,
    emit_header,
    header_json_bytes,
    parse_header,
)

from tests.unit.examples import examples

PACKAGE_NAMES = {
    **SERIAL,
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "U16": "uint16",
    "U32": "uint32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "F4": "float4_e2m1fn_x2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
# The package reads these and has no name to write them by.
READ_ONLY = {"F6_E2M3", "F6_E3M2"}
# Elements that fill whole bytes, where one does not.
PACKED = {"F4": 2, "F6_E2M3": 4, "F6_E3M2": 4}
names = st.text(min_size=1, max_size=20).filter(lambda text: text != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def in_whole_bytes(drawn):
    """Make the last length one that fills whole bytes."""
    dtype, shape = drawn
    if dtype not in PACKED:
        return dtype, shape
    return dtype, (*shape[:-1], PACKED[dtype] * (shape[-1] if shape else 1))


def contents_of(dtypes):
    drawn = st.tuples(st.sampled_from(sorted(dtypes)), shapes).map(in_whole_bytes)
    return st.dictionaries(names, drawn)


metadata = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)


def parse(data):
    length = header_json_bytes(data[:8], len(data), "file")
    return parse_header(data[8 : 8 + length], len(data), "file")


def file_of(document, body_bytes=0):
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(body_bytes)


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def size_of(dtype, shape):
    return int(np.prod(shape, dtype=object)) * DTYPE_BITS[dtype] // 8


def stored_shape(dtype, shape):
    """Return the shape the package is told: of two-element bytes where it counts those."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape


def test_every_dtype_of_the_format_is_written_by_the_package_or_read_from_files_made_by_hand():
    assert PACKAGE_NAMES.keys() | READ_ONLY == DTYPE_BITS.keys()
    assert not PACKAGE_NAMES.keys() & READ_ONLY


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_a_file_made_by_hand_is_read_as_the_package_reads_it(dtype):
    size = 8 * DTYPE_BITS[dtype] // 8
    data = file_of({"a": entry(dtype, (2, 4), (0, size))}, size)
    header = parse(data)
    ((name, theirs),) = deserialize(data)
    assert (name, theirs["dtype"], theirs["shape"]) == ("a", dtype, [2, 4])
    assert header.tensors[name] == (dtype, (2, 4), 0, size)
    with pytest.raises(HeaderRefused, match="spans"):
        parse(file_of({"a": entry(dtype, (2, 4), (0, size + 1))}, size + 1))


@settings(deadline=None, max_examples=examples(300))
@given(contents_of(PACKAGE_NAMES), metadata)
def test_what_the_package_writes_is_read_to_the_last_field(tensors, notes):
    buffers = {n: np.arange(size_of(*t), dtype=np.uint8) for n, t in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=PACKAGE_NAMES[dtype],
            shape=stored_shape(dtype, shape),
            data_ptr=buffers[name].ctypes.data,
            data_len=buffers[name].nbytes,
        )
        for name, (dtype, shape) in tensors.items()
    }
    data = bytes(serialize(specs, metadata=notes or None))
    header = parse(data)
    assert header.metadata == notes
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == tensors
    for name in tensors:
        start = header.file_offset(name)
        found = data[start : start + header.tensors[name].size_bytes]
        assert found == buffers[name].tobytes()


@settings(deadline=None, max_examples=examples(300))
@given(contents_of(DTYPE_BITS), metadata)
def test_what_is_written_the_package_reads_to_the_last_field(tensors, notes):
    header = emit_header(((n, d, s) for n, (d, s) in tensors.items()), notes)
    assert len(header) % 8 == 0
    body = np.arange(sum(size_of(*t) for t in tensors.values()), dtype=np.uint8).tobytes()
    read = dict(deserialize(header + body))
    position = 0
    assert read.keys() == tensors.keys()
    for name, (dtype, shape) in tensors.items():
        size = size_of(dtype, shape)
        assert (read[name]["dtype"], tuple(read[name]["shape"])) == (dtype, shape)
        assert bytes(read[name]["data"]) == body[position : position + size]
        position += size
    assert parse(header + body).metadata == notes


mutations = st.lists(
    st.tuples(
        st.integers(0, 400), st.one_of(st.integers(0, 255), st.sampled_from(b'0919",:[]{} '))
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=1500)
@given(mutations)
def test_no_damaged_file_is_accepted_that_the_package_refuses(changes):
    data = bytearray(
        file_of(
            {
                "__metadata__": {"format": "pt"},
                "a.weight": entry("BF16", (2, 3), (0, 12)),
                "b.scales": entry("F32", (1,), (12, 16)),
                "c": entry("F8_E4M3", (0,), (16, 16)),
            },
            16,
        )
    )
    for place, value in changes:
        data[place % len(data)] = value
    try:
        ours = parse(bytes(data))
    except HeaderRefused:
        return
    # Ours may be stricter, never laxer.
    theirs = dict(deserialize(bytes(data)))
    assert {n: (t.dtype, t.shape) for n, t in ours.tensors.items()} == {
        n: (t["dtype"], tuple(t["shape"])) for n, t in theirs.items()
    }


HOSTILE = {
    "nothing": (b"", "too short"),
    "seven bytes": (b"\0" * 7, "too short"),
    "length above the limit": (
        (HEADER_LIMIT_BYTES + 1).to_bytes(8, "little") + b"{}",
        "above the limit",
    ),
    "length of 2**63": ((1 << 63).to_bytes(8, "little") + b"{}", "above the limit"),
    "length beyond the file": ((100).to_bytes(8, "little") + b"{}", "file ends at byte"),
    "no object": (file_of(b"[]"), "does not start with"),
    "leading space": (file_of(b" {}"), "does not start with"),
    "not JSON": (file_of(b'{"a": }'), "not valid JSON"),
    "text after the object": (file_of(b"{}x"), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not UTF-8 at byte 10"),
    "deep JSON": (file_of(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "an endless number": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a name twice": (
        file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), 4),
        "'a' appears twice",
    ),
    "a field twice": (
        file_of(b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', 4),
        "'dtype' appears twice",
    ),
    "an overlap": (
        file_of({"a": entry(), "b": entry(offsets=(2, 6))}, 6),
        "'b' overlaps the tensor before it",
    ),
    "the same place": (file_of({"a": entry(), "b": entry()}, 4), "overlaps"),
    "a hole": (file_of({"a": entry(), "b": entry(offsets=(5, 9))}, 9), "'b' leaves a hole"),
    "a hole at the start": (file_of({"a": entry(offsets=(1, 5))}, 5), "leaves a hole"),
    "trailing bytes": (file_of({"a": entry()}, 5), "tensors end at byte"),
    "missing bytes": (file_of({"a": entry()}, 3), "tensors end at byte"),
    "an unknown dtype": (file_of({"a": entry("F7")}, 4), "unknown dtype 'F7'"),
    "a dtype that is no text": (file_of({"a": entry(7)}, 4), "unknown dtype"),
    "a negative length": (file_of({"a": entry(shape=(-4,))}, 4), "bad shape"),
    "a broken length": (file_of({"a": entry(shape=(4.0,))}, 4), "bad shape"),
    "a length that is a truth value": (
        file_of({"a": entry(shape=(True, 4))}, 4),
        "bad shape",
    ),
    "a negative offset": (file_of({"a": entry(offsets=(-4, 0))}, 4), "bad data_offsets"),
    "an offset of 2**64": (file_of({"a": entry(offsets=(0, 1 << 64))}, 4), "bad data_offsets"),
    "offsets turned round": (file_of({"a": entry(offsets=(4, 0))}, 4), "spans -4 bytes"),
    "three offsets": (file_of({"a": entry(offsets=(0, 4, 4))}, 4), "bad data_offsets"),
    "more elements than 64 bits": (
        file_of({"a": entry(shape=(1 << 33, 1 << 33))}, 4),
        "more elements than 64 bits",
    ),
    "a shape that overflows to zero": (
        file_of({"a": entry("F32", (1 << 32, 1 << 32), (0, 0))}),
        "more elements than 64 bits",
    ),
    "half a byte": (file_of({"a": entry("F4", (3,), (0, 1))}, 1), "ends inside a byte"),
    "a field too many": (file_of({"a": {**entry(), "x": 1}}, 4), "must have exactly"),
    "a field missing": (file_of({"a": {"dtype": "U8", "shape": [4]}}, 4), "must have exactly"),
    "an entry that is no object": (file_of({"a": 4}), "must have exactly"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "map text to text"),
    "metadata that is a list": (file_of({"__metadata__": []}), "map text to text"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_its_reason(case):
    data, reason = HOSTILE[case]
    with pytest.raises(HeaderRefused) as refusal:
        parse(data)
    assert reason in str(refusal.value)
    assert "file" in refusal.value.where


# What version 0.8 of the package lets pass. A name held twice hides one of two tensors.
PACKAGE_ACCEPTS = {"a name twice", "leading space", "a field too many"}


@pytest.mark.parametrize("case", sorted(HOSTILE.keys() - PACKAGE_ACCEPTS))
def test_the_package_refuses_the_same_hostile_files(case):
    with pytest.raises((SafetensorError, ValueError, OverflowError)):
        deserialize(HOSTILE[case][0])


def test_padding_after_the_object_is_part_of_the_format():
    raw = b'{"a":%s}' % json.dumps(entry()).encode() + b"   "
    assert parse(file_of(raw, 4)).data_start == 8 + len(raw)


def test_a_name_is_never_written_twice():
    with pytest.raises(HeaderRefused, match="written twice"):
        emit_header([("a", "U8", (1,)), ("a", "U8", (1,))], {})
