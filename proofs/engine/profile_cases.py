"""Engine runs of the profiles, by stage."""

from typing import Any

from proofs.drafts import cases as drafts
from proofs.engine.cases import ONLINE, ONLINE_FP8, TRITON, case, graphs, mtp

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
HEAD_TIMINGS_PATH = {
    "steered-95": "/tmp/spark-lm-head-times.json",  # of a machine for proofs
    "true-35b": "/tmp/spark-lm-head-times-true-35b.json",
}
CONVERSATIONS = [2500, 2300, 2200, 1200]
"""Tokens of the first turns; a cache block of the wide checkpoint has 1,056."""


def profile_cases() -> list[dict[str, Any]]:
    full = graphs(FULL)
    online = {"quantization_config": ONLINE_FP8}
    cases = [case(drafts.PLAIN, drafts.TREE, **QUIET)]
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
        cases += [
            case(f"tiny-{name}{suffix}", own, plugins="", options={**more, **config}, **QUIET)
            for suffix, config in options.items()
        ]
    return [*cases, *drafts.gpu_cases()]


def steered_cases() -> list[dict[str, Any]]:
    more = {"tokens": STEERED_TOKENS, **QUIET}
    full = graphs(FULL)
    tq = {**TURBOQUANT, **full, **mtp(2)}
    return [
        case("steered-95-plain", "steered-95", **more),
        case("steered-0-full-mtp2", "steered-0", options={**full, **mtp(2)}, **more),
        case("steered-50-full-mtp1", "steered-50", options={**full, **mtp(1)}, **more),
        case("steered-50-mtp2", "steered-50", options=mtp(2), **more),
        case("steered-95-full-mtp1", "steered-95", options={**full, **mtp(1)}, **more),
        case("steered-95-full-mtp2", "steered-95", options={**full, **mtp(2)}, **more),
        case("steered-95-tq-full-mtp2", "steered-95", options=tq, **more),
    ]


def prefix_cases() -> list[dict[str, Any]]:
    """Return cases of three turns, longer than two cache blocks, with and without the cache.

    ``agent-*`` use the trained model after unseen filler, with small margins; the others a steered
    model, whose margins reveal a wrong state.
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
    # As between two Sparks: only NCCL, no direct path between the cards.
    two = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True, **mtp(2)}
    more["environment"] = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    return [
        case("steered-95-tp2-mtp2", "steered-95", options=two, **more),
        case("steered-95-tp2-full-mtp2", "steered-95", options={**two, **graphs(FULL)}, **more),
        case(
            "steered-95-tp2-triton-mtp2", "steered-95-bf16", options=two, additional=TRITON, **more
        ),
    ]


def head_cases() -> list[dict[str, Any]]:
    """Return the opt-in head: measured on the first start, read from the file at the second."""
    more = {"tokens": STEERED_TOKENS, "options": mtp(2), **QUIET}
    alone = {"spark": {"lm_head": "int8-triton"}}
    cases = [case("steered-95-head-unmeasured-mtp2", "steered-95-bf16", additional=alone, **more)]
    for name, tree in (("steered-95", "steered-95-bf16"), ("true-35b", "true-35b")):
        head = {"spark": {"lm_head": "int8-triton", "lm_head_times": HEAD_TIMINGS_PATH[name]}}
        cases += [
            case(f"{name}-head-measured-mtp2", tree, additional=head, **more),
            case(f"{name}-head-read-mtp2", tree, additional=head, later=True, **more),
        ]
    return cases


def sizes_cases() -> list[dict[str, Any]]:
    pictures = {"language_model_only": False, "limit_mm_per_prompt": {"image": 1}}
    seen = {"prompts": "pictures", "tokens": 8, "ignore_eos": True}
    cases = [
        case("wide-portable", "wide-overlay", options=PORTABLE),
        case("wide-native", "wide-overlay", **HOOKS),
        case("pictures-portable", "wide-overlay", options={**PORTABLE, **pictures}, **seen),
        case("pictures-native", "wide-overlay", options=pictures, **seen),
        case("true-35b-full-mtp2", "true-35b", options={**graphs(FULL), **mtp(2)}, **QUIET),
        case("true-122b-full-mtp2", "true-122b", options={**graphs(FULL), **mtp(2)}, **QUIET),
    ]
    for name in ("true-35b", "true-122b"):
        cases += [
            case(f"{name}-portable", name, options=PORTABLE),
            case(f"{name}-native", name, **HOOKS),
        ]
    return cases


def names_cases() -> list[dict[str, Any]]:
    """Return target with vision tower, and drafter: together they read every tensor."""
    whole = {"language_model_only": False, "limit_mm_per_prompt": {"image": 1}, **mtp(1)}
    more = {"prompts": "pictures", "tokens": 8, "ignore_eos": True, "count_names": True, **QUIET}
    online = {"quantization_config": ONLINE_FP8}
    hybrids = ("wide-overlay", "wide-full", "wide-overlay-head8", "wide-full-head8")
    cases = [
        case(f"names-{tree}", tree, options=whole, **more)
        for tree in (*hybrids, "true-35b", "true-122b", "tiny-overlay-head8")
    ]
    return [
        *cases,
        case("names-wide-native", "wide-native", plugins="", options=whole, **more),
        case("names-wide-base", "wide-base", plugins="", options=whole, **more),
        case(
            "names-online-fp8", "wide-base-head8", plugins="", options={**whole, **online}, **more
        ),
    ]


def long_cases() -> list[dict[str, Any]]:
    more = {"lengths": LONG_PROMPTS, "tokens": 32, **QUIET}
    alone = {**LONG_OPTIONS, "max_num_seqs": 1}
    many = {**LONG_OPTIONS, **TURBOQUANT, **graphs(FULL), **mtp(2)}
    return [
        case("long-16-bit", "long", options=alone, **more),
        case("long-alone", "long", options={**alone, **TURBOQUANT}, **more),
        case("long-own-full-mtp2", "long", options=many, **more),
    ]


EAGER, COMPILED = "agent-plain", "agent-graphs"
TWINS = {"agent-eager": EAGER, "agent-full": COMPILED}
CUT = 1088
"""Tokens that a later turn finds in the cache: four blocks."""
SHAPES: dict[str, dict[str, Any]] = {
    "agent-alone": {"max_num_seqs": 1},
    "agent-cut": {"max_num_seqs": 1, "max_num_batched_tokens": CUT},
}
"""Eager without a cache, run once: sequential, and with the prompt split as the cache splits it."""
TIMES = 6


def reruns(name: str) -> list[str]:
    return [name, *(f"{name}-{time}" for time in range(2, TIMES + 1))]


def conversation_cases() -> list[dict[str, Any]]:
    cases = {case["name"]: case for case in prefix_cases()}
    plain = cases[EAGER]
    for name, more in {COMPILED: graphs(FULL), **SHAPES}.items():
        cases[name] = {**plain, "name": name, "options": {**plain["options"], **more}}
    steered = [case for name, case in cases.items() if name.startswith("prefixes-")]
    talks = (*TWINS, *TWINS.values())
    again = ({**cases[name], "name": copy} for name in talks for copy in reruns(name))
    return [*again, *(cases[shape] for shape in SHAPES), *steered]


MODELS = {"tiny": "text", "recall": "contexts"}
SIXTEEN_BIT = "16bit"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    SIXTEEN_BIT: ("plain", {"plugins": ""}),
    "base": ("base", {"plugins": ""}),
    "hybrid": ("overlay", {}),
    "hybrid-head8": ("overlay-head8", {}),
    "hybrid-triton": ("overlay", {"additional": TRITON}),
    "native": ("native", {"plugins": ""}),
    "online-fp8": ("base-head8", ONLINE),
    "wrong-scale": ("full-wrong-scale", {}),
}
"""Checkpoint and options; the last is damaged and must be detected."""
QUALITY_OPTIONS = {"max_model_len": 4096, "max_num_batched_tokens": 4096}


def quality_cases() -> list[dict[str, Any]]:
    cases = []
    for model, prompts in MODELS.items():
        for variant, (tree, more) in VARIANTS.items():
            options = {**QUALITY_OPTIONS, **more.get("options", {})}
            engine = case(f"{model}-{variant}", f"{model}-{tree}", **{**more, "options": options})
            cases.append({**engine, "prompts": prompts, "tokens": 1})
    return cases
