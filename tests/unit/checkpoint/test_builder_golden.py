"""The recipe version changes exactly when the bytes of a result do."""

import hashlib
import os

import pytest
from builder_shards import write_shard_by_hand
from builder_trees import Workshop, file_entries
from spark_contract.orders import RECIPE_VERSION

CASES = {
    "overlay": {"layout": "overlay"},
    "overlay, INT8 head": {"layout": "overlay", "head": "int8-g128"},
    "full, INT8 head": {"layout": "full", "head": "int8-g128"},
    "full, own FP8": {"layout": "full", "shared_experts": "fp8-self"},
    "full, INT8 shared experts": {"layout": "full", "shared_experts": "int8-g128"},
    "full, MTP from the donor": {"layout": "full", "graft": True},
}
# When a hash here changes on purpose, raise RECIPE_VERSION and write the new hashes under it:
# hosts then build again instead of taking an old tree for the new one.
GOLDEN = {
    1: {
        "overlay": "b7311533d979fc88",
        "overlay, INT8 head": "8abac8540c6b8637",
        "full, INT8 head": "546562f951550050",
        "full, own FP8": "f23698a2abd57667",
        "full, INT8 shared experts": "d95c53edfaadbab5",
        "full, MTP from the donor": "0f65e5bc76a8087f",
    },
}


def tree_hash(directory):
    lines = [f"{entry['path']} {entry['sha256']}\n" for entry in file_entries(directory)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("case", CASES)
def test_the_same_plan_gives_the_bytes_its_recipe_version_promises(tmp_path, case):
    workshop = Workshop(tmp_path, write_shard=write_shard_by_hand)
    changes = dict(CASES[case])
    if changes.pop("graft", False):
        workshop.mtp = {}
    workshop.write_base()
    workshop.write_donor()
    workshop.build(**changes)
    found = tree_hash(workshop.out)
    if "SPARK_SHOW_GOLDEN" in os.environ:
        pytest.fail(f'"{case}": "{found}",')
    assert found == GOLDEN[RECIPE_VERSION][case]
