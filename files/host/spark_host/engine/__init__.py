"""One engine: steps of its unit, container, memory, answers; for check, watch and rollout."""
