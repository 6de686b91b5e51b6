"""The cache formats in torch: sizes as the engine counts them, errors as their bits make them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from proofs.recall import formats  # noqa: E402

MEASURED = {  # relative error of a key and of a value of random numbers
    "turboquant_k8v4": (0.026, 0.10),
    "turboquant_4bit_nc": (0.10, 0.10),
    "turboquant_k3v4_nc": (0.19, 0.10),
    "turboquant_3bit_nc": (0.19, 0.21),
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("turboquant_k8v4", 388),
        ("turboquant_4bit_nc", 262),
        ("turboquant_k3v4_nc", 230),
        ("turboquant_3bit_nc", 198),
    ],
)
def test_bytes_are_those_of_the_engine(name: str, size: int) -> None:
    assert formats.PRESETS[name].bytes_per_head(256) == size


@pytest.mark.parametrize("name", list(formats.PRESETS))
def test_errors_of_random_keys_and_values_are_those_of_their_bits(name: str) -> None:
    x = torch.randn(400, 256, generator=torch.Generator().manual_seed(0))
    preset = formats.PRESETS[name]
    for made, most in zip((formats.keys, formats.values), MEASURED[name], strict=True):
        error = ((made(x, preset) - x).norm() / x.norm()).item()
        assert 0.5 * most < error < 1.2 * most


def test_the_rotation_turns_back() -> None:
    turn = formats.hadamard(128)
    assert torch.allclose(turn @ turn, torch.eye(128), atol=1e-5)
