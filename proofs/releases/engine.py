"""``vllm`` as its own command starts it; ``SPARK_FIRST_CONFIGURATION=1`` saves minutes of tuning.

Its engine processes are started anew from this module, so that they are arranged alike.
"""

from __future__ import annotations

from proofs.engine import quick

if quick.wanted():
    quick.start_quickly()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
