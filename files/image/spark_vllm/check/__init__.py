"""Self-check of the plugin against the engine it runs in.

``python -m spark_vllm.check`` reads the installed engine's sources, compares them with the table
of what we rely on, then imports everything and does one round trip of the configuration. It needs
no GPU. The same table is applied to the sources of released wheels by the tests.
"""
