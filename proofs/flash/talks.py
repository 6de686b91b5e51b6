"""Sampled answers with drafts, and conversations with a prefix cache, of Qwen4Exp."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from proofs.engine.cases import graphs, mtp
from proofs.flash import model
from proofs.flash.run import FULL, Results, Row, case
from proofs.judges.answers import acceptance, attempt, cache_hits, row
from proofs.judges.talks import Word, compare_words
from proofs.recall import sampling
from proofs.recall.cases import V3_DRAFTS
from proofs.trees.build import rewrite

HOTTER = {
    "temperature 1.5": {"temperature": 1.5},
    "temperature 2": {"temperature": 2.0},
    "temperature 2, top_k 20, top_p 0.95": {"temperature": 2.0, "top_k": 20, "top_p": 0.95},
}
"""At the usual settings the best token almost always wins: it leads by up to 14 nats. vLLM allows
temperatures of at most 2."""
MANY, FEWER = 1200, 400
SAMPLED = {"samples": FEWER, "cooler": 1.0, "settings": {**sampling.SETTINGS, **HOTTER}}


def sampling_cases() -> list[Row]:
    options = {**graphs(FULL), "max_num_seqs": 32, "kv_cache_memory_bytes": 2 << 30}
    more = {**SAMPLED, "lengths": [64, 48, 40, 33], "options": options}
    drawn = {name: V3_DRAFTS[name] for name in ("draft_sample_method", "rejection_sample_method")}
    block = {"speculative_config": {**mtp(3)["speculative_config"], **drawn}}
    return [
        case("sampled", "flash-file", **{**more, "samples": MANY}),
        case("sampled-mtp2", "flash-file", **{**more, "options": {**options, **mtp(2)}}),
        case("sampled-mtp3-block", "flash-file", **{**more, "options": {**options, **block}}),
        case("damage-cooler", "flash-file", **{**more, "samples": MANY, "cooler": 0.9}),
    ]


def judge_sampling(results: Results, work: Path, trees: Path) -> list[Row]:
    rows = []
    for name in [name for name, r in results.items() if r["state"] == "ran" and name != "sampled"]:
        damaged = name == "damage-cooler"
        judge, reference = sampling.judge_samples, results["sampled"]
        rows.append(attempt(name, judge, name, results[name], reference, damaged=damaged))
        rows[-1]["numbers"]["acceptance"] = acceptance(results[name])
    return rows


PLAIN, DAMAGED, FILE = "talk-plain", "talk-damage-states", "talk-file-cache-full-mtp3"


def prefix_cases() -> list[Row]:
    """Return conversations, in which answers and prompts cross boundaries of cache blocks."""
    talk = {"lengths": [1300, 1100, 900, 600], "turns": 2, "tokens": 160, "capture": False}
    plain = {"max_model_len": 2048}
    kept = {**plain, "enable_prefix_caching": True}
    full = {**kept, **graphs(FULL)}
    stock = {**talk, "plugins": "", "additional": {}}
    return [
        case(PLAIN, "talk-nvfp4", **stock, options=plain),
        case("talk-cache", "talk-nvfp4", **stock, options=kept),
        case("talk-cache-full-mtp2", "talk-nvfp4", **stock, options={**full, **mtp(2)}),
        case(FILE, "talk-file", **talk, options={**full, **mtp(3)}, count_rows=True),
        case(DAMAGED, "talk-nvfp4", **stock, damage=True, options=kept),
    ]


def make_talk_trees(trees: Path) -> None:
    """Let linear layers remember a whole prompt, and double their share of each answer.

    Their usual decay forgets within a few tokens.
    """
    decays = np.log(np.linspace(0.001, 0.01, model.TEXT["linear_num_value_heads"]))
    changed = {"A_log": decays, "norm.weight": np.full(128, 2.0)}
    for kind in ("nvfp4", "file"):
        tree = trees / f"talk-{kind}"
        shutil.copytree(trees / f"flash-{kind}", tree)
        for layer in range(model.TEXT["num_hidden_layers"] - 1):
            for name, values in changed.items():
                name = f"{model.LAYERS}.{layer}.linear_attn.{name}"
                rewrite(tree, name, values.astype("<f4").tobytes())


def judge_prefixes(results: Results, work: Path, trees: Path) -> list[Row]:
    """Judge changes of log-probabilities by those in the first turns, which hit no cache."""
    rows: list[Row] = []
    ran = {name: result for name, result in results.items() if result["state"] == "ran"}
    if PLAIN not in ran:
        return rows
    words = {name: list(compare_words(ran[PLAIN], ran[name])) for name in ran}
    calm = (word for name in words if name != DAMAGED for word in words[name] if not word.turn)
    noise = max(word.change for word in calm)
    judged = [name for name in ran if name != PLAIN]
    if FILE in ran:
        requested, used = (ran[FILE][key] for key in ("rows_requested", "requested_and_read"))
        claim = f"{FILE}: the engine reads the rows that the plugin requests ahead"
        numbers = {"requested": requested, "read": used}
        rows.append(row(claim, used > 0.99 * requested > 0, [FILE], **numbers))
    return rows + [
        attempt(name, _judge_hits, name, ran[name], words[name], noise) for name in judged
    ]


def _judge_hits(name: str, result: Row, words: list[Word], noise: float) -> Row:
    limit = max(0.05, 3 * noise)
    first, later = ([word for word in words if bool(word.turn) == hit] for hit in (False, True))
    equal = [
        all(word.change <= limit and (word.margin or 0) <= 2 * limit for word in turns)
        for turns in (first, later)
    ]
    hits = [cache_hits(turn) for turn in result["turns"]]
    if name == DAMAGED:
        claim, passed = f"{name}: only turns with hits differ", equal == [True, False]
    else:
        claim = f"{name}: answers with hits equal those without outside ties"
        passed = all(equal) and bool(later)
    return row(
        claim,
        passed and min(hits) > 0,
        [PLAIN, name],
        noise_of_first_turns=noise,
        limit=limit,
        largest_change=[
            max((word.change for word in turns), default=0) for turns in (first, later)
        ],
        words_beyond_limit=[sum(word.change > limit for word in turns) for turns in (first, later)],
        partings=[word._asdict() for word in words if word.margin is not None],
        words_compared_by_turn=sorted(Counter(word.turn for word in words).items()),
        tokens_found_by_turn=hits,
        acceptance=acceptance(result),
    )
