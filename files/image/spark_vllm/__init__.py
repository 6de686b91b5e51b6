"""vLLM plugin that serves hybrid INT4 + FP8 checkpoints.

Importing it imports neither vLLM nor torch: the self-check also runs with a broken engine.
"""

__version__ = "0.1.0"

QUANT_METHOD = "spark_inc"
"""Name of the quantisation method, in ``config.json`` and in vLLM's registry."""

PORTABLE_LOAD_FORMAT = "spark_portable"
"""Name of the load format that dequantises everything to BF16."""

ENTRY_POINT = "spark"
"""Name of the plugin in the entry point group ``vllm.general_plugins``."""

REQUEST_DEFAULTS = "SPARK_REQUEST_DEFAULTS"
"""Environment variable with the defaults of each served model name, as JSON."""

SUPPORTED_ENGINES = ("0.30.0", "0.32.0", "0.33.0")
"""vLLM releases whose sources this plugin was checked against."""
