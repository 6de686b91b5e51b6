"""Dequantize weights by definition; check refusals."""

import numpy as np
from builder_shards import BLOCK, bf16_values, e4m3_values

LAYOUTS = ("overlay", "full")
MODULE = "model.language_model.layers.1.mlp.shared_expert"


def donor_values(donor, module):
    weight, scale = donor[f"{module}.weight"], donor[f"{module}.weight_scale_inv"]
    codes = np.frombuffer(weight.data, np.uint8).reshape(weight.shape)
    scales = np.repeat(np.repeat(bf16_values(scale), BLOCK, 0), BLOCK, 1)
    return e4m3_values(codes) * scales[: weight.shape[0], : weight.shape[1]]


def unpack_packed(tensors, module, suffix="", bits=8):
    qweight = tensors[f"{module}.qweight{suffix}"]
    words = np.frombuffer(qweight.data, "<u4").reshape(qweight.shape)
    codes = np.stack([(words >> (bits * n)) % 2**bits for n in range(32 // bits)], axis=1)
    codes = codes.reshape(-1, qweight.shape[1]).astype(np.float64) - 2 ** (bits - 1)
    scales = bf16_values(tensors[f"{module}.scales{suffix}"])
    return (codes * np.repeat(scales, 128, axis=0)).T


def relative(actual, expected):
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def fill(name, byte):
    return lambda tensors: edit(tensors, name, lambda data: byte * len(data))


def set_first(name, new):
    return lambda tensors: edit(tensors, name, lambda data: new + data[len(new) :])


def set_last(name, new):
    return lambda tensors: edit(tensors, name, lambda data: data[: -len(new)] + new)


def edit(tensors, name, change):
    raw = tensors[name]
    tensors[name] = raw._replace(data=change(raw.data))


def exchange_gate_and_up(tensors):
    exchange(tensors, f"{MODULE}.gate_proj", f"{MODULE}.up_proj")


def exchange(tensors, first, second):
    for suffix in ("weight", "weight_scale_inv"):
        a, b = f"{first}.{suffix}", f"{second}.{suffix}"
        tensors[a], tensors[b] = tensors[b], tensors[a]


def refused(workshop, code=3, **changes):
    workshop.write_sources(**changes)
    before = workshop.base_hashes()
    done = workshop.build(check=False, **changes)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "; fix: " in done.stderr
    assert not workshop.out.exists()
    assert workshop.base_hashes() == before
    return done.stderr
