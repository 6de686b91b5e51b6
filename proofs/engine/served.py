"""The ``vllm`` command with the settings of ``quick``, also for the processes it spawns."""

import sys

from proofs.engine import quick

if quick.is_enabled():
    quick.start_quickly()
if quick.flash_attention() == 3 and any("turboquant" in word for word in sys.argv):
    quick.read_turboquant_prompts_with_flash_attention_3()
if any("ngram_table" in word for word in sys.argv):
    from proofs.flash.engine import use_plain_mixers

    use_plain_mixers()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
