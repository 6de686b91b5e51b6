"""The slow work of a plan: trees, jobs, and what pruning must leave. Pure."""
