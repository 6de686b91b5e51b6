"""vLLM plugin that serves hybrid INT4 + FP8 checkpoints.

This module imports neither vLLM nor torch, so that the self-check runs even in a broken engine.
"""

__version__ = "0.1.0"

QUANT_METHOD = "spark_inc"

PORTABLE_LOAD_FORMAT = "spark_portable"
"""Load format that dequantizes all weights to BF16."""

ENTRY_POINT = "spark"

REQUEST_DEFAULTS = "SPARK_REQUEST_DEFAULTS"

SUPPORTED_ENGINES = ("0.30.0", "0.32.0", "0.33.0")
"""vLLM releases whose sources this plugin was checked against."""
