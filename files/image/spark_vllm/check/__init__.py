"""Self-check of the plugin against the engine it runs in.

``python -m spark_vllm.check`` compares the installed engine's sources with the table of symbols
that the plugin uses, imports them, and loads a sample configuration. It needs no GPU.
"""
