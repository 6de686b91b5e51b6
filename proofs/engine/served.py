"""``vllm`` as its own command starts it, arranged as the environment asks (``quick``).

Its engine processes are started anew from this module, so that they are arranged alike.
"""

from __future__ import annotations

import sys

from proofs.engine import quick

if quick.wanted():
    quick.start_quickly()
if quick.flash_attention() == 3 and any("turboquant" in word for word in sys.argv):
    quick.read_turboquant_prompts_with_flash_attention_3()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
