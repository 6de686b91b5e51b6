"""Engine runs of single claims, as data: each profile's way of serving, steered drafts, true sizes.

Stages: ``profiles`` (drafts, drafters and graphs on the trained model), ``steered`` (drafts with a
known acceptance), ``prefixes`` (prefix caching in conversations), ``sizes`` (true layer sizes,
pictures, transformers beside), ``long`` (TurboQuant with long contexts), ``head-choice``
(the opt-in head measured at its first start), ``names`` (every tensor is read), ``two-gpus``.
"""

from __future__ import annotations

from typing import Any

from proofs.drafts import cases as drafts
from proofs.engine.cases import ONLINE_FP8, TRITON, case, graphs, mtp

QUIET = {"capture": False}
HOOKS = {"hook_modules": True}
PORTABLE = {"load_format": "spark_portable"}
FULL = "FULL_AND_PIECEWISE"
STEERED_TOKENS = 300
LONG_PROMPTS = [60000, 33000, 20011, 16]
LONG_OPTIONS = {
    "max_model_len": 65536,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 1 << 31,
}
TURBOQUANT = {"kv_cache_dtype": "turboquant_k8v4", "attention_config": {}}
HEAD_TIMES = {
    "steered-95": "/tmp/spark-lm-head-times.json",  # of a machine for proofs
    "true-35b": "/tmp/spark-lm-head-times-true-35b.json",
}
CONVERSATIONS = [2500, 2300, 2200, 1200]
"""Tokens of the first turns; a cache block of the wide tree has 1,056."""


def profile_cases() -> list[dict[str, Any]]:
    """The trained model as the profiles without plugin serve it, and with drafters."""
    full = graphs(FULL)
    online = {"quantization_config": ONLINE_FP8}
    found = [case(drafts.PLAIN, drafts.TREE, **QUIET)]
    for name, own, more in (
        ("native", "tiny-native", {}),
        ("online-fp8", "tiny-base-head8", online),
    ):
        options: dict[str, dict[str, Any]] = {
            "": {},
            "-mtp2": mtp(2),
            "-full": full,
            "-full-mtp2": {**full, **mtp(2)},
        }
        found += [
            case(f"tiny-{name}{suffix}", own, plugins="", options={**more, **chosen}, **QUIET)
            for suffix, chosen in options.items()
        ]
    return [*found, *drafts.gpu_cases()]


def steered_cases() -> list[dict[str, Any]]:
    """Models whose tokens and acceptance are known beforehand."""
    more = {"tokens": STEERED_TOKENS, **QUIET}
    full = graphs(FULL)
    return [
        case("steered-95-plain", "steered-95", **more),
        case("steered-0-full-mtp2", "steered-0", options={**full, **mtp(2)}, **more),
        case("steered-50-full-mtp1", "steered-50", options={**full, **mtp(1)}, **more),
        case("steered-50-mtp2", "steered-50", options=mtp(2), **more),
        case("steered-95-full-mtp1", "steered-95", options={**full, **mtp(1)}, **more),
        case("steered-95-full-mtp2", "steered-95", options={**full, **mtp(2)}, **more),
        case(
            "steered-95-tq-full-mtp2",
            "steered-95",
            options={**TURBOQUANT, **full, **mtp(2)},
            **more,
        ),
    ]


def prefix_cases() -> list[dict[str, Any]]:
    """Conversations of three turns, longer than two cache blocks, with and without the cache.

    ``agent-*`` on the trained model behind filler it never saw: its margins are small. The others
    on a steered one, whose tokens are known and whose margins tell of its state.
    """
    talk = {"filler": 120, "turns": 2, "prompt_count": 4, **QUIET}
    tree = "tiny-overlay-head8"
    more = {"lengths": CONVERSATIONS, "turns": 2, "tokens": 64, **QUIET}
    plain = {"max_model_len": 4096}
    kept = {**plain, "enable_prefix_caching": True}
    return [
        case("agent-plain", tree, options=plain, **talk),
        case("agent-eager", tree, options=kept, **talk),
        case("agent-full", tree, options={**kept, **graphs(FULL)}, **talk),
        case("prefixes-plain", "steered-95", options=plain, other_beginning=True, **more),
        case("prefixes-eager", "steered-95", options=kept, **more),
        case("prefixes-full", "steered-95", options={**kept, **graphs(FULL)}, **more),
    ]


def two_gpu_cases() -> list[dict[str, Any]]:
    more = {"tokens": STEERED_TOKENS, **QUIET}
    # As between two Sparks: NCCL alone, no way from card to card past it.
    two = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True, **mtp(2)}
    more["environment"] = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    return [
        case("steered-95-tp2-mtp2", "steered-95", options=two, **more),
        case("steered-95-tp2-full-mtp2", "steered-95", options={**two, **graphs(FULL)}, **more),
        case(
            "steered-95-tp2-triton-mtp2",
            "steered-95-bf16",
            options=two,
            additional=TRITON,
            **more,
        ),
    ]


def head_cases() -> list[dict[str, Any]]:
    """The opt-in head: measured at the first start, read from the file at the second.

    On the steered model, whose tokens are known, and on a head of true size.
    """
    more = {"tokens": STEERED_TOKENS, "options": mtp(2), **QUIET}
    alone = {"spark": {"lm_head": "int8-triton"}}
    found = [
        case("steered-95-head-unmeasured-mtp2", "steered-95-bf16", additional=alone, **more),
    ]
    for name, tree in (("steered-95", "steered-95-bf16"), ("true-35b", "true-35b")):
        head = {"spark": {"lm_head": "int8-triton", "lm_head_times": HEAD_TIMES[name]}}
        found += [
            case(f"{name}-head-measured-mtp2", tree, additional=head, **more),
            case(f"{name}-head-read-mtp2", tree, additional=head, later=True, **more),
        ]
    return found


def sizes_cases() -> list[dict[str, Any]]:
    pictures = {"language_model_only": False, "limit_mm_per_prompt": {"image": 1}}
    seen = {"prompts": "pictures", "tokens": 8, "ignore_eos": True}
    found = [
        case("wide-portable", "wide-overlay", options=PORTABLE),
        case("wide-native", "wide-overlay", **HOOKS),
        case("pictures-portable", "wide-overlay", options={**PORTABLE, **pictures}, **seen),
        case("pictures-native", "wide-overlay", options=pictures, **seen),
        case("true-35b-full-mtp2", "true-35b", options={**graphs(FULL), **mtp(2)}, **QUIET),
        case("true-122b-full-mtp2", "true-122b", options={**graphs(FULL), **mtp(2)}, **QUIET),
    ]
    for name in ("true-35b", "true-122b"):
        found += [
            case(f"{name}-portable", name, options=PORTABLE),
            case(f"{name}-native", name, **HOOKS),
        ]
    return found


def names_cases() -> list[dict[str, Any]]:
    """Whole class, vision tower and drafter: every tensor of a tree has somebody who reads it."""
    whole = {"language_model_only": False, "limit_mm_per_prompt": {"image": 1}, **mtp(1)}
    more = {"prompts": "pictures", "tokens": 8, "ignore_eos": True, "count_names": True, **QUIET}
    online = {"quantization_config": ONLINE_FP8}
    hybrids = ("wide-overlay", "wide-full", "wide-overlay-head8", "wide-full-head8")
    found = [
        case(f"names-{tree}", tree, options=whole, **more)
        for tree in (*hybrids, "true-35b", "true-122b", "tiny-overlay-head8")
    ]
    return [
        *found,
        case("names-wide-native", "wide-native", plugins="", options=whole, **more),
        case("names-wide-base", "wide-base", plugins="", options=whole, **more),
        case(
            "names-online-fp8", "wide-base-head8", plugins="", options={**whole, **online}, **more
        ),
    ]


def long_cases() -> list[dict[str, Any]]:
    """Four prompts, three of them long, one by one without drafts and all at once with them."""
    more = {"lengths": LONG_PROMPTS, "tokens": 32, **QUIET}
    many = {**LONG_OPTIONS, **TURBOQUANT, **graphs(FULL), **mtp(2)}
    return [
        case("long-16-bit", "long", options={**LONG_OPTIONS, "max_num_seqs": 1}, **more),
        case(
            "long-alone", "long", options={**LONG_OPTIONS, **TURBOQUANT, "max_num_seqs": 1}, **more
        ),
        case("long-own-full-mtp2", "long", options=many, **more),
    ]


EAGER, COMPILED = "agent-plain", "agent-graphs"
TWINS = {"agent-eager": EAGER, "agent-full": COMPILED}
"""Of each engine with the cache the one that computes alike without it."""
CUT = 1088
"""Tokens that a later turn finds in the cache: four blocks of the trained model."""
SHAPES: dict[str, dict[str, Any]] = {
    "agent-alone": {"max_num_seqs": 1},
    "agent-cut": {"max_num_seqs": 1, "max_num_batched_tokens": CUT},
}
"""Eager and without a cache in other steps: one conversation at a time, and its prompt in parts as
the cache makes them."""
TIMES = 6


def again(name: str) -> list[str]:
    return [name, *(f"{name}-{time}" for time in range(2, TIMES + 1))]


def conversation_cases() -> list[dict[str, Any]]:
    """All conversations of ``prefix_cases``, those of the trained model ``TIMES`` times."""
    found = {one["name"]: one for one in prefix_cases()}
    plain = found[EAGER]
    for name, more in {COMPILED: graphs(FULL), **SHAPES}.items():
        found[name] = {**plain, "options": {**plain["options"], **more}}
    steered = [one for name, one in found.items() if name.startswith("prefixes-")]
    talks = [one for one in found if one.startswith("agent-")]
    return [*({**found[name], "name": copy} for name in talks for copy in again(name)), *steered]


MODELS = {"tiny": "text", "recall": "contexts"}
SIXTEEN_BIT = "16bit"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    SIXTEEN_BIT: ("plain", {"plugins": ""}),
    "base": ("base", {"plugins": ""}),
    "hybrid": ("overlay", {}),
    "hybrid-head8": ("overlay-head8", {}),
    "hybrid-triton": ("overlay", {"additional": TRITON}),
    "native": ("native", {"plugins": ""}),
    "online-fp8": ("base-head8", {"plugins": "", "options": {"quantization_config": ONLINE_FP8}}),
    "wrong-scale": ("full-wrong-scale", {}),
}
"""Tree and further options of each; the last is damaged, and has to be seen."""
QUALITY_OPTIONS = {"max_model_len": 4096, "max_num_batched_tokens": 4096}


def quality_cases() -> list[dict[str, Any]]:
    """Logits of every position of the same prompts; nothing is drafted, all of it eager."""
    found = []
    for model, prompts in MODELS.items():
        for way, (tree, more) in VARIANTS.items():
            options = {**QUALITY_OPTIONS, **more.get("options", {})}
            one = case(f"{model}-{way}", f"{model}-{tree}", **{**more, "options": options})
            found.append({**one, "prompts": prompts, "tokens": 1})
    return found
