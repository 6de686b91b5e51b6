"""Build the engine's configuration for a checkpoint and stop; run by the engine's Python.

This is where checkpoints are refused, before any process for weights is started.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    from vllm.engine.arg_utils import EngineArgs

    options = json.loads(sys.argv[2])
    EngineArgs(sys.argv[1], skip_tokenizer_init=True, **options).create_engine_config()
