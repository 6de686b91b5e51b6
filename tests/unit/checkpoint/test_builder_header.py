import json

import numpy as np
import pytest
from builder_shards import SERIAL
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, TensorSpec, deserialize, serialize
from spark_checkpoint import ValidationError, headers

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
PACKED = {"F4": 2, "F6_E2M3": 4, "F6_E3M2": 4}
names = st.text(min_size=1, max_size=20).filter(lambda text: text != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
metadata = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)


def fill_bytes(drawn):
    dtype, shape = drawn
    if dtype not in PACKED:
        return dtype, shape
    return dtype, (*shape[:-1], PACKED[dtype] * (shape[-1] if shape else 1))


def tensor_sets(dtypes):
    drawn = st.tuples(st.sampled_from(sorted(dtypes)), shapes).map(fill_bytes)
    return st.dictionaries(names, drawn)


def parse(data):
    length = headers.header_json_bytes(data[:8], len(data), "file")
    return headers.parse_header(data[8 : 8 + length], len(data), "file")


def file_of(document, body_bytes=0):
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(body_bytes)


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def size_of(dtype, shape):
    return int(np.prod(shape, dtype=object)) * headers.DTYPE_BITS[dtype] // 8


@pytest.mark.parametrize("dtype", sorted(headers.DTYPE_BITS))
def test_reads_every_dtype_as_safetensors_does(dtype):
    size = 8 * headers.DTYPE_BITS[dtype] // 8
    data = file_of({"a": entry(dtype, (2, 4), (0, size))}, size)
    ((name, reference),) = deserialize(data)
    assert (name, reference["dtype"], reference["shape"]) == ("a", dtype, [2, 4])
    assert parse(data).tensors[name] == (dtype, (2, 4), 0, size)
    with pytest.raises(ValidationError, match=r"has \d+ bytes, but its shape"):
        parse(file_of({"a": entry(dtype, (2, 4), (0, size + 1))}, size + 1))


@settings(deadline=None, max_examples=examples(300))
@given(tensor_sets(PACKAGE_NAMES), metadata)
def test_reads_files_written_by_safetensors(tensors, notes):
    buffers = {name: np.arange(size_of(*spec), dtype=np.uint8) for name, spec in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=PACKAGE_NAMES[dtype],
            shape=(*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape,
            data_ptr=buffers[name].ctypes.data,
            data_len=buffers[name].nbytes,
        )
        for name, (dtype, shape) in tensors.items()
    }
    data = bytes(serialize(specs, metadata=notes or None))
    header = parse(data)
    assert header.metadata == notes
    assert {
        name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()
    } == tensors
    for name, tensor in header.tensors.items():
        start = header.file_offset(name)
        assert data[start : start + tensor.size_bytes] == buffers[name].tobytes()


@settings(deadline=None, max_examples=examples(300))
@given(tensor_sets(headers.DTYPE_BITS), metadata)
def test_writes_files_that_safetensors_reads(tensors, notes):
    header = headers.format_header(((n, d, s) for n, (d, s) in tensors.items()), notes)
    assert len(header) % 8 == 0
    body = np.arange(sum(size_of(*spec) for spec in tensors.values()), dtype=np.uint8).tobytes()
    read = dict(deserialize(header + body))
    position = 0
    assert read.keys() == tensors.keys()
    for name, (dtype, shape) in tensors.items():
        size = size_of(dtype, shape)
        assert (read[name]["dtype"], tuple(read[name]["shape"])) == (dtype, shape)
        assert bytes(read[name]["data"]) == body[position : position + size]
        position += size
    assert parse(header + body).metadata == notes


values = st.one_of(st.integers(0, 255), st.sampled_from(b'0919",:[]{} '))
mutations = st.lists(st.tuples(st.integers(0, 400), values), min_size=1, max_size=4)
VALID = file_of(
    {
        "__metadata__": {"format": "pt"},
        "a.weight": entry("BF16", (2, 3), (0, 12)),
        "b.scales": entry("F32", (1,), (12, 16)),
        "c": entry("F8_E4M3", (0,), (16, 16)),
    },
    16,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=1500)
@given(mutations)
def test_rejects_damaged_files_that_safetensors_rejects(changes):
    data = bytearray(VALID)
    for place, value in changes:
        data[place % len(data)] = value
    try:
        header = parse(bytes(data))
    except ValidationError:
        return
    reference = dict(deserialize(bytes(data)))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()} == {
        name: (entry["dtype"], tuple(entry["shape"])) for name, entry in reference.items()
    }


TWICE = json.dumps(entry()).encode()
HOSTILE = {
    "nothing": (b"", "too few for a header"),
    "seven bytes": (b"\0" * 7, "too few for a header"),
    "length above the limit": (
        (headers.HEADER_LIMIT_BYTES + 1).to_bytes(8, "little") + b"{}",
        "exceeds the limit",
    ),
    "length of 2**63": ((1 << 63).to_bytes(8, "little") + b"{}", "exceeds the limit"),
    "length beyond the file": ((100).to_bytes(8, "little") + b"{}", "file ends at byte"),
    "no object": (file_of(b"[]"), "does not start with"),
    "leading space": (file_of(b" {}"), "does not start with"),
    "not JSON": (file_of(b'{"a": }'), "not valid JSON"),
    "text after the object": (file_of(b"{}x"), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not UTF-8 at byte 10"),
    "deep JSON": (file_of(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "an endless number": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a repeated name": (file_of(b'{"a":%s,"a":%s}' % (TWICE, TWICE), 4), "'a' appears twice"),
    "a repeated field": (
        file_of(b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', 4),
        "'dtype' appears twice",
    ),
    "an overlap": (file_of({"a": entry(), "b": entry(offsets=(2, 6))}, 6), "'b' overlaps"),
    "the same place": (file_of({"a": entry(), "b": entry()}, 4), "overlaps"),
    "a hole": (file_of({"a": entry(), "b": entry(offsets=(5, 9))}, 9), "'b' leaves a hole"),
    "a hole at the start": (file_of({"a": entry(offsets=(1, 5))}, 5), "leaves a hole"),
    "trailing bytes": (file_of({"a": entry()}, 5), "tensors end at byte"),
    "missing bytes": (file_of({"a": entry()}, 3), "tensors end at byte"),
    "an unknown dtype": (file_of({"a": entry("F7")}, 4), "unknown dtype 'F7'"),
    "a number as dtype": (file_of({"a": entry(7)}, 4), "unknown dtype"),
    "a negative length": (file_of({"a": entry(shape=(-4,))}, 4), "invalid shape"),
    "a fractional length": (file_of({"a": entry(shape=(4.0,))}, 4), "invalid shape"),
    "a boolean length": (file_of({"a": entry(shape=(True, 4))}, 4), "invalid shape"),
    "text as shape": (file_of({"a": {**entry(), "shape": "4"}}, 4), "invalid shape"),
    "a negative offset": (file_of({"a": entry(offsets=(-4, 0))}, 4), "invalid data_offsets"),
    "an offset of 2**64": (file_of({"a": entry(offsets=(0, 1 << 64))}, 4), "invalid data_offsets"),
    "reversed offsets": (file_of({"a": entry(offsets=(4, 0))}, 4), "has -4 bytes"),
    "three offsets": (file_of({"a": entry(offsets=(0, 4, 4))}, 4), "invalid data_offsets"),
    "too many elements": (
        file_of({"a": entry(shape=(1 << 33, 1 << 33))}, 4),
        "does not fit in 64 bits",
    ),
    "a shape that overflows to zero": (
        file_of({"a": entry("F32", (1 << 32, 1 << 32), (0, 0))}),
        "does not fit in 64 bits",
    ),
    "half a byte": (file_of({"a": entry("F4", (3,), (0, 1))}, 1), "not a whole number of bytes"),
    "a surplus field": (file_of({"a": {**entry(), "x": 1}}, 4), "must have exactly"),
    "a missing field": (file_of({"a": {"dtype": "U8", "shape": [4]}}, 4), "must have exactly"),
    "a number as entry": (file_of({"a": 4}), "must have exactly"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "map strings to strings"),
    "metadata as a list": (file_of({"__metadata__": []}), "map strings to strings"),
}
# Version 0.8 of the package accepts these; a repeated name hides a tensor.
PACKAGE_ACCEPTS = {"a repeated name", "leading space", "a surplus field"}


@pytest.mark.parametrize("case", HOSTILE)
def test_rejects_malicious_headers_as_safetensors_does(case):
    data, problem = HOSTILE[case]
    with pytest.raises(ValidationError) as refusal:
        parse(data)
    assert problem in str(refusal.value)
    if case not in PACKAGE_ACCEPTS:
        with pytest.raises((SafetensorError, ValueError, OverflowError)):
            deserialize(data)


def test_accepts_padding_after_the_json_header():
    raw = b'{"a":%s}' % TWICE + b"   "
    assert parse(file_of(raw, 4)).data_start == 8 + len(raw)


def test_never_writes_a_tensor_name_twice():
    with pytest.raises(ValidationError, match="written twice"):
        headers.format_header([("a", "U8", (1,)), ("a", "U8", (1,))], {})


TEXT = st.text(max_size=8)
LAYOUTS = ({}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}, {"ensure_ascii": False})


def read_map(text, **more):
    return headers.parse_weight_map(
        text.encode("utf-8", "surrogatepass"), "index", "fetch it", **more
    )


@given(st.dictionaries(TEXT, TEXT, max_size=6), st.sampled_from(LAYOUTS), st.booleans())
def test_index_scanner_agrees_with_json_parser(names, layout, first):
    rest = {"metadata": {"total_size": 1, "weight_map": {"not": "this"}}}
    document = {"weight_map": names, **rest} if first else {**rest, "weight_map": names}
    text = json.dumps(document, **layout)
    assert read_map(text) == json.loads(text)["weight_map"]


def test_index_scanner_reads_common_indexes_without_the_json_parser(monkeypatch):
    names = {f"layers.{n}.weight": f"model-{n // 100}.safetensors" for n in range(1000)}
    text = json.dumps({"metadata": {}, "weight_map": names}, indent=2)
    sizes, loads = [], json.loads
    monkeypatch.setattr(
        json, "loads", lambda part, **how: sizes.append(len(part)) or loads(part, **how)
    )
    actual = read_map(text)
    assert actual == names
    assert max(sizes) < 100
    assert len({id(file) for file in actual.values()}) == 10


def test_index_scanner_keeps_selected_names_and_the_last_duplicate():
    text = '{"weight_map": {"a": "x", "b": "y"}}'
    assert read_map(text, keep=lambda name: name == "b") == {"b": "y"}
    assert read_map('{"weight_map": {"a": "x", "a": "y"}}') == {"a": "y"}
