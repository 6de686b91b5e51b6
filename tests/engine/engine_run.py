"""Generate answers with one checkpoint; run by the engine's Python.

Arguments: the checkpoint, a file for the answers (JSON), further engine options (JSON).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8] * 4, [100, 200, 300, 17, 400], list(range(60)))


def main(checkpoint: str, answers: str, options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        checkpoint,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 28,
        skip_tokenizer_init=True,
        language_model_only=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=8, logprobs=5, ignore_eos=True, detokenize=False
    )
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    outputs = [answer.outputs[0] for answer in engine.generate(prompts, sampling)]
    drafts = [metric for metric in engine.get_metrics() if metric.name.endswith("num_drafts")]
    body = {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [
                sorted((token, item.logprob) for token, item in step.items())
                for step in output.logprobs
            ]
            for output in outputs
        ],
        "drafts": sum(getattr(metric, "value", 0) for metric in drafts),
    }
    Path(answers).write_text(json.dumps(body))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
