from typing import Any

from proofs.engine.cases import TRITON, graphs, mtp
from proofs.recall.language import VOCABULARY
from proofs.recall.trees import INT4_DRAFTS, NAME, V3

PIECEWISE, FULL = "PIECEWISE", "FULL_AND_PIECEWISE"
PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
UPSTREAM = tuple(f"{number}_per_token_head" for number in ("int8", "fp8", "int4"))
LONG = 131072
ROOM: dict[str, Any] = {
    "max_model_len": LONG + 256,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 2 << 30,
}
TALKING: dict[str, Any] = {
    "max_model_len": 49152,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 1 << 30,
}
TIGHT = {"max_model_len": 12288, "kv_cache_memory_bytes": 1 << 27}
"""Enough for about a single conversation: blocks of other conversations are evicted."""
TALK_SEED, OTHER_SEED = 5, 6
EIGHT = {"max_num_seqs": 8}
KINDS = {"record": 24, "passage": 4, "register": 4}
SOME = {"record": 16, "passage": 3, "register": 3}
FEW = {"record": 8, "passage": 2, "register": 2}
LENGTHS = {
    "4096": {"near": False, "kinds": KINDS},
    "32768": {"near": True, "kinds": SOME},
    "65536": {"near": False, "kinds": FEW},
    str(LONG): {"near": True, "kinds": FEW},
}
ONE_LONG = {
    "4096": LENGTHS["4096"],
    "32768": {"near": True, "kinds": FEW},
    str(LONG): {"near": True, "kinds": {"record": 3, "passage": 1}},
}
"""For attention that reads long prompts slowly."""
SHORTER = {name: LENGTHS[name] for name in ("4096", "32768")}
FARTHEST = 262144
WIDE: dict[str, Any] = {
    "max_model_len": FARTHEST,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 5,
}
FIVE = {
    str(FARTHEST - before): {"near": False, "kinds": {"record": 5, "passage": 2, "register": 1}}
    for before in (256, 512)
}
"""Eight questions on each of two contexts, five at once; each prompt is computed in full."""
CACHE = {"enable_prefix_caching": True}
ALONE = {"max_num_seqs": 1}
BF16_STATES = {"mamba_ssm_cache_dtype": "bfloat16"}
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
NO_ASYNC = {"async_scheduling": False}


def case(name: str, tree: str = NAME, **more: Any) -> dict[str, Any]:
    options = {"enforce_eager": True, **more.pop("options", {})}
    return {"name": name, "tree": tree, "options": options, **more}


def recall_cases() -> list[dict[str, Any]]:
    band = [LONG // 4, LONG // 2]
    lengths = {"recall": LENGTHS}
    return [
        case("recall-16bit", options=ROOM, **lengths),
        case("recall-16bit-again", options=ROOM, **lengths),
        case("recall-16bit-full-mtp2", options={**ROOM, **graphs(FULL), **mtp(2)}, **lengths),
        case("recall-bf16-states", options={**ROOM, **BF16_STATES}, **lengths),
        case(
            "recall-bf16-states-full-mtp2",
            options={**ROOM, **BF16_STATES, **graphs(FULL), **mtp(2)},
            **lengths,
        ),
        case("recall-dequantised", options={**ROOM, "load_format": "spark_portable"}, **lengths),
        case("damage-band", options=ROOM, damage={"band": band}, recall=LENGTHS),
        case("damage-noise-30", options=ROOM, damage={"noise": [0.3]}, recall=LENGTHS),
        case("damage-noise-100", options=ROOM, damage={"noise": [1.0]}, recall=LENGTHS),
        case("damage-states", options=ROOM, damage={"states": []}, recall=LENGTHS),
    ]


def turboquant_cases() -> list[dict[str, Any]]:
    cases, stock = [], {"stock_turboquant": True, "recall": SHORTER}
    for preset in PRESETS:
        options = {**ROOM, "kv_cache_dtype": f"turboquant_{preset}", "attention_config": {}}
        many = {**options, **graphs(FULL), **mtp(2)}
        cases += [
            case(f"tq-{preset}", options=options, recall=LENGTHS),
            case(f"tq-{preset}-full-mtp2", options=many, recall=LENGTHS),
            case(f"tq-{preset}-stock-alone", options={**options, **ALONE}, **stock),
        ]
        if preset in PRESETS[:2]:
            cases.append(case(f"tq-{preset}-stock-full-mtp2", options=many, **stock))
    return cases


def wide_cases() -> list[dict[str, Any]]:
    def wide_options(gib: int, kind: str = "auto") -> dict[str, Any]:
        own = {"attention_config": {}} if kind != "auto" else {}
        return {**WIDE, "kv_cache_memory_bytes": gib << 30, "kv_cache_dtype": kind, **own}

    many = {**graphs(FULL), **mtp(2)}
    cases = [
        case("wide-16bit", options=wide_options(7), recall=FIVE),
        case("wide-16bit-full-mtp2", options={**wide_options(11), **many}, recall=FIVE),
    ]
    for preset in PRESETS:
        options, more = (wide_options(gib, f"turboquant_{preset}") for gib in (4, 7))
        cases.append(case(f"wide-tq-{preset}", options=options, recall=FIVE))
        if preset in PRESETS[:2]:
            cases += [
                case(f"wide-tq-{preset}-full-mtp2", options={**more, **many}, recall=FIVE),
                case(f"wide-tq-{preset}-alone", options={**options, **ALONE}, recall=FIVE),
            ]
    return cases


def prefix_cases() -> list[dict[str, Any]]:
    talk = {"talks": TALK_SEED}
    both = {**TALKING, **CACHE}
    cases = [
        case("talk-plain", options=TALKING, long=True, **talk),
        case("talk-mtp2", options={**TALKING, **mtp(2)}, long=True, **talk),
        case("talk-cache", options=both, long=True, **talk),
    ]
    cases += [
        case(f"talk-cache-mtp{n}", options={**both, **mtp(n)}, long=True, **talk) for n in (1, 2, 3)
    ]
    full = {**both, **graphs(FULL), **mtp(2)}
    piecewise = {**both, **graphs(PIECEWISE), **mtp(2)}
    cases += [
        case("talk-cache-full", options={**both, **graphs(FULL)}, long=True, **talk),
        case("talk-cache-full-mtp2", options=full, long=True, **talk),
        case("talk-cache-piecewise-mtp2", options=piecewise, long=True, **talk),
    ]
    small = {"max_num_batched_tokens": 256}
    tq = {"kv_cache_dtype": f"turboquant_{PRESETS[0]}", "attention_config": {}}
    tq["max_num_batched_tokens"] = 8192
    return [
        *cases,
        case("talk-cache-full-mtp2-no-async", options={**full, **NO_ASYNC}, long=True, **talk),
        case("talk-cache-full-mtp3", options={**full, **mtp(3)}, long=True, **talk),
        case("talk-eight-full-mtp2", options={**full, **EIGHT}, long=True, **talk),
        case("talk-other-plain", options=TALKING, long=True, talks=OTHER_SEED),
        case("talk-other-full-mtp2", options=full, long=True, talks=OTHER_SEED),
        case("talk-tight-full-mtp2", options={**full, **TIGHT}, **talk),
        case("talk-tq-plain", options={**TALKING, **tq}, long=True, **talk),
        case("talk-tq-cache-full-mtp2", options={**full, **tq}, long=True, **talk),
        case("talk-bf16-states-plain", options={**TALKING, **BF16_STATES}, long=True, **talk),
        case(
            "talk-bf16-states-cache-full-mtp2", options={**full, **BF16_STATES}, long=True, **talk
        ),
        case("talk-small-step", options={**both, **small}, **talk),
        case("talk-small-step-full-mtp2", options={**full, **small}, **talk),
        case("talk-damage-states", options=both, damage={"states": []}, **talk),
        case("talk-damage-carry-mtp2", options={**both, **mtp(2)}, damage={"carry": []}, **talk),
        case("talk-damage-carry-full-mtp2", options=full, damage={"carry": []}, **talk),
    ]


def draft_cases() -> list[dict[str, Any]]:
    cases = [case("drafts-none", options={**ROOM, **graphs(FULL)}, recall=SHORTER)]
    for tree, short in ((NAME, "16bit"), (INT4_DRAFTS, "int4")):
        for drafts in (1, 2, 3):
            on = {**ROOM, **graphs(FULL), **mtp(drafts)}
            cases.append(case(f"drafts-{short}-mtp{drafts}", tree, options=on, recall=SHORTER))
    broken = {**ROOM, **mtp(2)}
    return [*cases, case("drafts-damage", options=broken, damage={"drafts": []}, recall=SHORTER)]


V3_DRAFTS: dict[str, Any] = {
    "draft_sample_method": "probabilistic",
    "rejection_sample_method": "block",
    "num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 4, 1]],
}
"""Those of ``catalog/profiles/v3.yml``: two drafts for one or two requests, one for more."""
HALF_VOCABULARY = {"spark": {**TRITON["spark"], "draft_vocabulary": VOCABULARY // 2}}
SHUFFLED = 3
"""Seed of the half of the vocabulary that ``proofs/recall/engine.py`` writes to a file."""
ACCEPT_ALMOST_ALL = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.9}
MANY, FEWER = 4000, 400


def sampling_cases() -> list[dict[str, Any]]:
    def sampled(name: str, sequences: int, drafts: Any = None, **more: Any) -> dict[str, Any]:
        options = {**ROOM, **graphs(FULL), "max_num_seqs": sequences, **more.pop("states", {})}
        if drafts is not None:
            speculation = {**mtp(2)["speculative_config"], **drafts}
            options["speculative_config"] = speculation
        more = {"samples": FEWER, "additional": TRITON, "tree": V3, "recall": SHORTER, **more}
        return case(name, options=options, **more)

    unscheduled = {name: V3_DRAFTS[name] for name in list(V3_DRAFTS)[:2]}
    wide = {"samples": MANY}
    return [
        sampled("sampling-none", 64, **wide),
        sampled("sampling-none-again", 48, **wide),
        sampled("sampling-greedy-drafts", 2, {}),
        sampled("sampling-v2", 2, {}, tree=NAME, additional={}),
        sampled("sampling-v3-two", 2, V3_DRAFTS),
        sampled("sampling-v3-four", 4, V3_DRAFTS),
        sampled("sampling-v3-vocabulary", 2, V3_DRAFTS, additional=HALF_VOCABULARY),
        sampled(
            "sampling-v3-text-vocabulary",
            2,
            V3_DRAFTS,
            additional=HALF_VOCABULARY,
            draft_vocabulary_seed=SHUFFLED,
        ),
        sampled("sampling-v3-wide", 64, unscheduled, **wide),
        sampled("sampling-bf16-states-none", 64, states=BF16_STATES, **wide),
        sampled(
            "sampling-bf16-states-v3-vocabulary",
            2,
            V3_DRAFTS,
            states=BF16_STATES,
            additional=HALF_VOCABULARY,
        ),
        sampled("sampling-damage-cooler", 64, cooler=0.9, **wide),
        sampled("sampling-damage-accept", 64, ACCEPT_ALMOST_ALL),
    ]


def format_cases() -> list[dict[str, Any]]:
    """The plugin's TurboQuant and the formats of the engine's own Triton attention.

    The latter run with graphs: an eager engine lost an answer of its first step with each of them.
    """
    cases = [
        case("format-16bit", options=ROOM),
        case("format-16bit-full-mtp2", options={**ROOM, **graphs(FULL), **mtp(2)}),
    ]
    for kind in ("turboquant_k8v4", *UPSTREAM):
        options = {**ROOM, "kv_cache_dtype": kind, "attention_config": {}, **graphs(FULL)}
        cases += [
            case(f"format-{kind}-full", options=options),
            case(f"format-{kind}-full-mtp2", options={**options, **mtp(2)}),
        ]
    return [{**item, "recall": ONE_LONG} for item in cases]


def flashinfer_cases() -> list[dict[str, Any]]:
    lengths = {"recall": LENGTHS}
    attention = {**ROOM, "attention_config": {"backend": "FLASHINFER"}}
    gdn = {"additional": {"gdn_prefill_backend": "flashinfer"}}
    talking = {**TALKING, **CACHE}
    cases = [
        case("fi-gdn", options=ROOM, **gdn, **lengths),
        case("fi-gdn-full-mtp2", options={**ROOM, **graphs(FULL), **mtp(2)}, **gdn, **lengths),
        case("fi-gdn-states", options=ROOM, damage={"states": []}, **gdn, recall=SHORTER),
    ]
    for mode, short in ((PIECEWISE, "piecewise"), (FULL, "full")):
        on = {**attention, **graphs(mode)}
        cases += [
            case(f"fi-attention-{short}", options=on, fa2=True, **lengths),
            case(f"fi-xqa-{short}", options=on, fa2=True, xqa=True, **lengths),
        ]
    eager = {**attention, "enforce_eager": True}
    cases += [
        case("fi-attention-eager", options=eager, fa2=True, **lengths),
        case("fi-xqa-eager", options=eager, fa2=True, xqa=True, **lengths),
        case("fi-hopper-full", options={**attention, **graphs(FULL)}, **lengths),
    ]
    own: tuple[tuple[str, dict[str, Any]], ...] = (("attention", {}), ("xqa", {"xqa": True}))
    for kernel, more in own:
        again = {"options": {**attention, **graphs(FULL)}, "fa2": True, **lengths, **more}
        blocking = {**again, "options": {**attention, **graphs(PIECEWISE)}, "environment": BLOCKING}
        cases += [
            case(f"fi-{kernel}-full-again", **again),
            case(f"fi-{kernel}-piecewise-blocking", **blocking),
        ]
    drafting = {**attention, **graphs(FULL), **mtp(2)}
    cases += [
        case("fi-attention-full-mtp2", options=drafting, fa2=True, **lengths),
        case("fi-xqa-full-mtp2", options=drafting, fa2=True, xqa=True, **lengths),
        case(
            "fi-attention-noise", options=eager, fa2=True, damage={"noise": [1.0]}, recall=SHORTER
        ),
    ]
    full = {**talking, **graphs(FULL)}
    every = {**full, **mtp(2), "attention_config": {"backend": "FLASHINFER"}}
    talk = {"talks": TALK_SEED, "long": True}
    return [
        *cases,
        case("fi-talk-plain", options=TALKING, **gdn, **talk),
        case("fi-talk-cache-full", options=full, **gdn, **talk),
        case("fi-talk-cache-full-mtp2", options={**full, **mtp(2)}, **gdn, **talk),
        case("fi-talk-attention-full-mtp2", options=every, fa2=True, **gdn, **talk),
        case("fi-talk-xqa-full-mtp2", options=every, fa2=True, xqa=True, **gdn, **talk),
    ]


def waiting_cases() -> list[dict[str, Any]]:
    attention = {**ROOM, "attention_config": {"backend": "FLASHINFER"}, **NO_ASYNC}
    cases = [case("fi-none", options=ROOM, recall=SHORTER)]
    for mode, on in (("eager", {}), ("full", graphs(FULL))):
        for kernel, more in (("attention", {}), ("xqa", {"xqa": True})):
            options = {**attention, **on}
            name = f"fi-{kernel}-{mode}-no-async"
            cases.append(case(name, options=options, fa2=True, recall=SHORTER, **more))
    return cases


STAGES = {
    "recall": recall_cases,
    "turboquant": turboquant_cases,
    "wide": wide_cases,
    "drafts": draft_cases,
    "sampling": sampling_cases,
    "formats": format_cases,
    "prefixes": prefix_cases,
    "flashinfer": flashinfer_cases,
    "flashinfer-waiting": waiting_cases,
}
