"""Self-check of the plugin against the engine it runs in.

``python -m spark_vllm.check`` compares the installed engine's sources with the table of symbols
that the plugin uses, imports them and does a round trip of the configuration. It needs no GPU.
Tests apply the same table to the sources of released wheels.
"""
