"""The judge of quality; needs torch."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from proofs.judges import quality  # noqa: E402 # after the skip


def logits(noise: float) -> torch.Tensor:
    source = torch.Generator().manual_seed(3)
    plain = torch.randn(400, 64, generator=source) * 6
    return plain + noise * torch.randn(400, 64, generator=source)


BASE = quality.compare_logits(logits(0.0), logits(0.05))


@pytest.mark.parametrize(("noise", "near"), [(0.05, True), (0.1, True), (3.0, False)])
def test_distance_from_the_base_is_judged(noise: float, near: bool) -> None:
    assert quality.is_near(quality.compare_logits(logits(0.0), logits(noise)), BASE, 0.02) is near


def test_too_few_positions_fail() -> None:
    few = quality.compare_logits(logits(0.0)[:20], logits(0.05)[:20])
    assert not quality.is_near(few, BASE, 0.02)


def test_divergence_equals_torch() -> None:
    expected, computed = logits(0.0).double(), logits(1.0).double()
    reference = torch.nn.functional.kl_div(
        computed.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert quality.compare_logits(expected, computed)["divergence_mean"] == pytest.approx(
        float(reference), abs=1e-5
    )
