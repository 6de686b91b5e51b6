import os

import pytest

pytest.importorskip("vllm")

from proofs.whole import __main__ as whole


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times steps on an idle GPU")
@pytest.mark.skipif(not whole.PLANS.exists(), reason="needs plans: `make gpu-plans`")
def test_full_size_checkpoints_match_their_plans(results):
    rows = whole.prove(results)
    assert [row["claim"] for row in rows if row["passed"] is False] == []
