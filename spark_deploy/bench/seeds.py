"""Protocol `seeds`: five prompts one after the other, twice; tokens over wall time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spark_deploy.bench.client import Endpoint, ask
from spark_deploy.bench.prompts import RUNS, SEEDS
from spark_deploy.bench.result import Answer
from spark_deploy.ticking import ticking


def measure(
    endpoint: Endpoint, context_tokens: int, say: Callable[[str], None]
) -> Iterator[Answer]:
    """Yield an answer for each prompt and run.

    Args:
        endpoint: who is asked.
        context_tokens: what the engine takes in all; longer answers are asked for shorter.
        say: tells a person each figure.
    """
    for run in range(1, RUNS + 1):
        for prompt in SEEDS:
            tokens = min(prompt.tokens, context_tokens // 2)
            at = f"seeds, run {run}, {prompt.name}"
            with ticking(at, say):
                timed = ask(endpoint, prompt.text, tokens)
            answer = Answer(
                prompt.name, run, tokens, timed.prompt_tokens, timed.completion_tokens,
                round(timed.first_token_s, 4), round(timed.wall_s, 4),
            )  # fmt: skip
            told = (
                f"{answer.tokens_per_s:.1f} tok/s, first token after {answer.first_token_s:.2f} s"
            )
            say(f"{at}: {answer.completion_tokens} tokens, {told}")
            yield answer
