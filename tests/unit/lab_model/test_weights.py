"""The trained weights in the tree: which recipe they are of, and what storing them keeps."""

from pathlib import Path

import numpy as np
import pytest

from lab.errors import LabError
from lab.model import original, repository, weights
from lab.model.shape import TINY, Shape
from lab.model.spread import spread


@pytest.mark.slow
def test_base_and_shared_experts_are_the_same_bytes_after_storing(tmp_path: Path) -> None:
    made = original.random_weights(TINY, weights.VISION_SEED)
    source = np.random.default_rng(3)
    for name, values in made.items():  # as after a training: no weight is exactly 0 or 1
        if not name.startswith(weights.VISION):
            made[name] = values + source.normal(0, 0.03, values.shape).astype(np.float32)
    weights.write(tmp_path / "weights.npz", made)
    found = weights.read(TINY, tmp_path / "weights.npz")
    before, after = spread(TINY, made), spread(TINY, found)
    base = [repository.int4_tensors(one) for one in (before, after)]
    assert [name for name in base[0] if base[0][name].data != base[1][name].data] == []
    donor = [repository.fp8_tensors(one) for one in (before, after)]
    shared = [name for name in donor[0] if ".shared_expert." in name and "mtp." not in name]
    assert len(shared) == TINY.layers * 3 * 2
    assert [name for name in shared if donor[0][name].data != donor[1][name].data] == []


@pytest.mark.slow
def test_what_is_no_weight_of_this_model_is_refused(tmp_path: Path) -> None:
    other = Shape(layers=8)
    weights.write(tmp_path / "weights.npz", original.random_weights(other, 1))
    with pytest.raises(LabError, match="holds another model"):
        weights.read(TINY, tmp_path / "weights.npz")
