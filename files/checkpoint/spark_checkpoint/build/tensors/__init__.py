"""New tensors of a result: grafted, packed or copied, and held against what they replace."""
