import pytest
from spark_vllm.checkpoint.names import check_expert_width

MODULE = "language_model.model.layers.0.mlp.experts"


@pytest.mark.parametrize("width", [256, 512, 1024])
def test_experts_of_several_groups_are_taken(width):
    check_expert_width(MODULE, width, 128)


@pytest.mark.parametrize("width", [64, 128])
def test_experts_of_one_group_are_refused_by_name_with_a_way_out(width):
    with pytest.raises(ValueError, match=f"{MODULE}: its experts are {width} wide.*fix: a smaller"):
        check_expert_width(MODULE, width, 128)
