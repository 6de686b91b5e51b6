"""Answers of the recall model: ``python3 -m proofs.recall.engine CASE.json OUT_DIR``."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from proofs.engine import case as engine_case
from proofs.engine import quick
from proofs.recall import language, sampling
from proofs.recall.judge import COUNTS, judge_answer, unlikely_steps
from proofs.recall.language import Context, Question

FIRST_TURNS = (1504, 2336, 3008, 544, 4512, 7008)
"""Tokens of the clients' first contexts; blocks of the recall model have 272."""
MORE = (224, 1888, 416, 992)
TURN_KINDS = ("register", "record", "passage", "register", "record")
SHARED = 5024
LONG_TOKENS = 40_000
AGAIN = 3


@dataclass(frozen=True)
class Asked:
    client: str
    kind: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Talk:
    name: str
    source: np.random.Generator
    made: Context
    asked: list[Asked] = field(default_factory=list)

    def ask(self, kind: str) -> Asked:
        seed = int(self.source.integers(1 << 31))
        question = self._question(kind, seed)
        prompt = Asked(self.name, kind, [*self.made.tokens.tolist(), *question.tokens], [])
        prompt.answer.extend(question.answer)
        self.asked.append(prompt)
        appended = [*question.tokens, *question.answer]
        if kind == "register":
            appended = [*appended, *appended, language.PAD, language.PAD]
        made, untaught = self.made, np.full(len(appended), language.UNTAUGHT)
        self.made = replace(
            made,
            tokens=np.concatenate([made.tokens, appended]),
            labels=np.concatenate([made.labels, untaught]),
        )
        return prompt

    def _question(self, kind: str, seed: int) -> Question:
        questions = language.questions(self.made, seed, {kind: 5})
        if not questions:
            questions = language.questions(self.made, seed, {"record": 5})
        return questions[seed % len(questions)]

    def add(self, length: int) -> None:
        more = language.context(self.source, length, near=False, asks=False, long=language.LONGER)
        offset = len(self.made.tokens)
        registers = np.where(more.registers >= 0, more.registers, self.made.registers)
        self.made = Context(
            np.concatenate([self.made.tokens, more.tokens]),
            np.concatenate([self.made.labels, more.labels]),
            np.concatenate([self.made.records, more.records + offset]),
            np.concatenate([self.made.passages, more.passages + offset]),
            registers,
            self.made.long,
        )


def start_talk(name: str, seed: int, length: int) -> Talk:
    source = np.random.default_rng([seed, 3])
    context = language.context(source, length, near=False, asks=False, long=language.LONGER)
    return Talk(name, source, context)


def make_rounds(seed: int, *, long: bool = False) -> list[list[Asked]]:
    """Return conversations with known answers, typical for clients of a prefix cache.

    The prompts of a round are sent at once and contain the right answers of earlier turns, so every
    engine gets the same prompts. ``long`` adds a conversation of 40,000 tokens.
    """
    alone = start_talk("alone", seed, 1216).ask("record")
    rounds = [[alone] for _ in range(AGAIN)]
    shared = start_talk("shared", seed + 1, SHARED).made
    questions = language.questions(shared, seed, {"record": 4, "passage": 2, "register": 3})
    together = [
        Asked("shared", question.kind, [*shared.tokens.tolist(), *question.tokens], question.answer)
        for question in questions
    ]
    rounds += [together, list(reversed(together))]
    talks = [
        start_talk(f"client{number}", seed + 10 + number, size)
        for number, size in enumerate(FIRST_TURNS)
    ]
    if long:
        talks.append(start_talk("long", seed + 50, LONG_TOKENS))
    for turn in range(4):
        rounds.append([])
        for number, talk in enumerate(talks):
            if turn:
                talk.add(MORE[(turn + number) % len(MORE)])
            rounds[-1].append(talk.ask(TURN_KINDS[(turn + number) % len(TURN_KINDS)]))
    # Repeat early turns, mixed with other prompts, then the last turns.
    rounds.append([talk.asked[1] for talk in talks] + together[:3] + [alone])
    rounds.append([talk.asked[-1] for talk in talks] + together[3:])
    return rounds


def lose_band(start: int, end: int) -> None:
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    project = Qwen3NextAttention._project_qkv_gate

    def projected(self: Any, qkv: Any, positions: Any) -> Any:
        q, k, v, gate = project(self, qkv, positions)
        position = positions if positions.dim() == 1 else positions[0]
        kept = ((position < start) | (position >= end)).to(k.dtype)[:, None]
        return q, k * kept, v * kept, gate

    Qwen3NextAttention._project_qkv_gate = projected


def add_noise(relative: float) -> None:
    import torch
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    project = Qwen3NextAttention._project_qkv_gate

    def noisy(x: Any, width: int) -> Any:
        heads = x.view(len(x), -1, width)
        size = heads.float().pow(2).mean(-1, keepdim=True).sqrt()
        return (heads + relative * size * torch.randn_like(heads)).to(x.dtype).view_as(x)

    def projected(self: Any, qkv: Any, positions: Any) -> Any:
        q, k, v, gate = project(self, qkv, positions)
        return q, noisy(k, self.head_dim), noisy(v, self.head_dim), gate

    Qwen3NextAttention._project_qkv_gate = projected


def forget_states() -> None:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import ChunkGatedDeltaRule

    for name in ("forward_native", "forward_cuda"):
        own = getattr(ChunkGatedDeltaRule, name)
        setattr(ChunkGatedDeltaRule, name, _without_state(own))


def _without_state(own: Callable[..., Any]) -> Callable[..., Any]:
    def rule(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["initial_state"] = kwargs["initial_state"] * 0
        return own(self, *args, **kwargs)

    return rule


def keep_no_states() -> None:
    from vllm.v1.worker import mamba_utils

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    mamba_utils.MambaSpecDecodeGPUContext.run_fused_postprocess_align = nothing
    mamba_utils.MambaSpecDecodeGPUContext.run_fused_precopy = nothing


def break_drafts() -> None:
    import torch
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MultiTokenPredictor

    own = Qwen3_5MultiTokenPredictor.forward

    def forward(
        self: Any, input_ids: Any, positions: Any, hidden_states: Any, *args: Any, **kwargs: Any
    ) -> Any:
        noise = torch.randn_like(hidden_states) * hidden_states.abs().mean()
        return own(self, input_ids, positions, noise, *args, **kwargs)

    Qwen3_5MultiTokenPredictor.forward = forward


WAYS: dict[str, Callable[..., None]] = {
    "band": lose_band,
    "noise": add_noise,
    "states": forget_states,
    "carry": keep_no_states,
    "drafts": break_drafts,
}


KEPT = 40
EXAMPLE_TOKENS = 8
SEEDS_OF_A_TALK = 100
"""The clients of a conversation use about 60 of the next seeds."""


def generate(llm: Any, prompts: list[list[int]], counts: list[int]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0, max_tokens=count, logprobs=KEPT, ignore_eos=True, detokenize=False
        )
        for count in counts
    ]
    requests = [engine_case.to_request(prompt) for prompt in prompts]
    answers = []
    for answer in llm.generate(requests, sampling, use_tqdm=False):
        output = answer.outputs[0]
        steps = [
            {str(token): round(value.logprob, 5) for token, value in step.items()}
            for step in output.logprobs
        ]
        answers.append({"tokens": list(output.token_ids), "steps": steps})
    return answers


def recall(llm: Any, lengths: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for length, wanted in lengths.items():
        source = np.random.default_rng([int(length), 7])
        size = int(length) // 32 * 32
        context = language.context(source, size, near=wanted["near"], asks=False)
        questions = language.questions(context, int(length), wanted["kinds"])
        prompts = [[*context.tokens.tolist(), *question.tokens] for question in questions]
        started = time.monotonic()
        answers = generate(llm, prompts, [len(question.answer) for question in questions])
        seconds = round(time.monotonic() - started, 1)
        for question, answer in zip(questions, answers, strict=True):
            about = {"length": size, "kind": question.kind, "depth": round(question.depth, 4)}
            results.append({**about, "s": seconds, **judge_answer(answer, question.answer)})
    return results


def converse(llm: Any, seed: int, long: bool) -> list[dict[str, Any]]:
    results = []
    for number, prompts in enumerate(make_rounds(seed, long=long)):
        answers = generate(
            llm, [prompt.prompt for prompt in prompts], [len(prompt.answer) for prompt in prompts]
        )
        counters = engine_case.read_counters(llm)
        hits = sum(v for k, v in counters.items() if k.endswith("prefix_cache_hits"))
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            row = judge_answer(answer, prompt.answer)
            row.pop("steps")
            if unlikely := unlikely_steps(answer):
                row["unlikely"] = unlikely
            about = {"round": number, "place": place, "client": prompt.client, "kind": prompt.kind}
            digest = hashlib.sha256(np.array(prompt.prompt).tobytes()).hexdigest()[:12]
            about |= {"length": len(prompt.prompt), "prompt": digest, "hits_so_far": hits}
            results.append({**about, **row})
    return results


def repeat(llm: Any, seed: int, seconds: float) -> dict[str, Any]:
    """Repeat conversations with new seeds for ``seconds``; return counts and suspect answers.

    Suspect answers are wrong, which may be the model's error, or contain a token that is not the
    most likely of its step. At temperature 0, such a token was computed or copied incorrectly.
    """
    ended = time.monotonic() + seconds
    counts, suspect = dict.fromkeys(COUNTS, 0), []
    while time.monotonic() < ended:
        for number, prompts in enumerate(make_rounds(seed, long=True)):
            lengths = [len(prompt.answer) for prompt in prompts]
            answers = generate(llm, [prompt.prompt for prompt in prompts], lengths)
            for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                counts["answers"] += 1
                counts["tokens"] += len(answer["tokens"])
                wrong = answer["tokens"] != prompt.answer
                counts["wrong"] += wrong
                unlikely = unlikely_steps(answer)
                if wrong or unlikely:
                    about = {"seed": seed, "round": number, "place": place, "kind": prompt.kind}
                    about |= {"client": prompt.client, "length": len(prompt.prompt)}
                    about |= {
                        "wanted": prompt.answer[:EXAMPLE_TOKENS],
                        "tokens": answer["tokens"][:EXAMPLE_TOKENS],
                    }
                    suspect.append({**about, "unlikely": unlikely})
        counts["talks"] += 1
        seed += SEEDS_OF_A_TALK
    return {**counts, "suspect": suspect}


def with_draft_vocabulary(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the case with a file of the drafter's tokens: random ids in random order."""
    spark = case["additional"]["spark"]
    source = np.random.default_rng(case["draft_vocabulary_seed"])
    ids = source.permutation(language.VOCABULARY)[: spark["draft_vocabulary"]]
    path = out / f"{case['name']}-token-ids.json"
    path.write_text(json.dumps(ids.tolist()))
    spark = {**spark, "draft_vocabulary_file": str(path)}
    return {**case, "additional": {**case["additional"], "spark": spark}}


def run(case: dict[str, Any], out: Path) -> dict[str, Any]:
    quick.start_quickly()
    if "draft_vocabulary_seed" in case:
        case = with_draft_vocabulary(case, out)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if case.get("xqa"):
        # The kernel is compiled locally; skip the check for downloads.
        import vllm.utils.flashinfer as flashinfer_utils

        flashinfer_utils.has_nvidia_artifactory = lambda: True
    if case.get("fa2"):
        # Select the kernels of compute capability 12.x instead of Hopper's.
        import flashinfer.utils

        flashinfer.utils.is_sm90a_supported = lambda *_: False
    for name, numbers in case.get("damage", {}).items():
        WAYS[name](*numbers)
    llm, result = engine_case.start_engine(case, skip_tokenizer_init=True, max_logprobs=KEPT)
    result["block_tokens"] = llm.llm_engine.vllm_config.cache_config.block_size
    result["flash_attention"] = os.environ.get(quick.FLASH, "2")
    if case.get("recall"):
        result["recall"] = recall(llm, case["recall"])
    if case.get("talks"):
        result["talks"] = converse(llm, case["talks"], bool(case.get("long")))
    if case.get("repeat_s"):
        result["repeated"] = repeat(llm, case["seed"], case["repeat_s"])
    result["counters"] = engine_case.read_counters(llm)
    if case.get("samples"):
        result |= sampling.sample(llm, case["samples"], case.get("cooler", 1.0))
    return result


if __name__ == "__main__":
    engine_case.write_result(run)
