"""The engine runs of the recall proofs, as data, by stage."""

from __future__ import annotations

from typing import Any

from proofs.engine.cases import graphs, mtp
from proofs.recall.trees import INT4_DRAFTS, NAME

PIECEWISE, FULL = "PIECEWISE", "FULL_AND_PIECEWISE"
PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
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
"""Room for about one conversation: others' blocks have to go."""
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
SHORTER = {name: LENGTHS[name] for name in ("4096", "32768")}
FARTHEST = 262144
WIDE: dict[str, Any] = {
    "max_model_len": FARTHEST,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 5,
}
FIVE = {str(FARTHEST - 256): {"near": False, "kinds": {"record": 3, "passage": 1, "register": 1}}}
"""Five questions on one context, sent at once; each is computed whole."""
CACHE = {"enable_prefix_caching": True}
ALONE = {"max_num_seqs": 1}
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
"""The host waits for every kernel, so nothing it prepares is late."""
NO_ASYNC = {"async_scheduling": False}


def case(name: str, **more: Any) -> dict[str, Any]:
    """Return one engine run; eager unless its options say otherwise."""
    options = {"enforce_eager": True, **more.pop("options", {})}
    return {"name": name, "tree": NAME, "options": options, **more}


def recall_cases() -> list[dict[str, Any]]:
    """The model with a 16-bit cache, and what damage does to its answers."""
    band = [LONG // 4, LONG // 2]
    asked = {"recall": LENGTHS}
    return [
        case("recall-16bit", options=ROOM, **asked),
        case("recall-16bit-again", options=ROOM, **asked),
        case("recall-16bit-full-mtp2", options={**ROOM, **graphs(FULL), **mtp(2)}, **asked),
        case("recall-dequantised", options={**ROOM, "load_format": "spark_portable"}, **asked),
        case("damage-band", options=ROOM, damage={"band": band}, recall=LENGTHS),
        case("damage-noise-30", options=ROOM, damage={"noise": [0.3]}, recall=LENGTHS),
        case("damage-noise-100", options=ROOM, damage={"noise": [1.0]}, recall=LENGTHS),
        case("damage-states", options=ROOM, damage={"states": []}, recall=LENGTHS),
    ]


def turboquant_cases() -> list[dict[str, Any]]:
    """Every preset with our backend and with the engine's own: alone, and four with drafts."""
    found = []
    for preset in PRESETS:
        held = {**ROOM, "kv_cache_dtype": f"turboquant_{preset}", "attention_config": {}}
        many = {**held, **graphs(FULL), **mtp(2)}
        found += [
            case(f"tq-{preset}", options=held, recall=LENGTHS),
            case(f"tq-{preset}-full-mtp2", options=many, recall=LENGTHS),
            case(
                f"tq-{preset}-stock-alone",
                options={**held, **ALONE},
                stock_turboquant=True,
                recall=SHORTER,
            ),
        ]
        if preset in PRESETS[:2]:
            found.append(
                case(
                    f"tq-{preset}-stock-full-mtp2",
                    options=many,
                    stock_turboquant=True,
                    recall=SHORTER,
                )
            )
    return found


def wide_cases() -> list[dict[str, Any]]:
    """Five sequences of 262,144 tokens at once: 16 bit, each preset, and one after the other."""

    def held(gib: int, kind: str = "auto") -> dict[str, Any]:
        own = {"attention_config": {}} if kind != "auto" else {}
        return {**WIDE, "kv_cache_memory_bytes": gib << 30, "kv_cache_dtype": kind, **own}

    many = {**graphs(FULL), **mtp(2)}
    found = [
        case("wide-16bit", options=held(7), recall=FIVE),
        case("wide-16bit-full-mtp2", options={**held(11), **many}, recall=FIVE),
    ]
    for preset in PRESETS:
        options = held(4, f"turboquant_{preset}")
        found.append(case(f"wide-tq-{preset}", options=options, recall=FIVE))
        if preset in PRESETS[:2]:
            found += [
                case(
                    f"wide-tq-{preset}-full-mtp2",
                    options={**held(7, f"turboquant_{preset}"), **many},
                    recall=FIVE,
                ),
                case(f"wide-tq-{preset}-alone", options={**options, **ALONE}, recall=FIVE),
            ]
    return found


def prefix_cases() -> list[dict[str, Any]]:
    """Conversations with prefix caching and drafts, each alone and both together."""
    talk = {"talks": TALK_SEED}
    both = {**TALKING, **CACHE}
    found = [
        case("talk-plain", options=TALKING, long=True, **talk),
        case("talk-mtp2", options={**TALKING, **mtp(2)}, long=True, **talk),
        case("talk-cache", options=both, long=True, **talk),
    ]
    for drafts in (1, 2, 3):
        found.append(
            case(f"talk-cache-mtp{drafts}", options={**both, **mtp(drafts)}, long=True, **talk)
        )
    full = {**both, **graphs(FULL), **mtp(2)}
    piecewise = {**both, **graphs(PIECEWISE), **mtp(2)}
    found += [
        case("talk-cache-full", options={**both, **graphs(FULL)}, long=True, **talk),
        case("talk-cache-full-mtp2", options=full, long=True, **talk),
        case("talk-cache-piecewise-mtp2", options=piecewise, long=True, **talk),
    ]
    small = {"max_num_batched_tokens": 256}
    return [
        *found,
        case("talk-cache-full-mtp2-no-async", options={**full, **NO_ASYNC}, long=True, **talk),
        case("talk-cache-full-mtp3", options={**full, **mtp(3)}, long=True, **talk),
        case("talk-eight-full-mtp2", options={**full, **EIGHT}, long=True, **talk),
        case("talk-other-plain", options=TALKING, long=True, talks=OTHER_SEED),
        case("talk-other-full-mtp2", options=full, long=True, talks=OTHER_SEED),
        case("talk-tight-full-mtp2", options={**full, **TIGHT}, **talk),
        *held_talk_cases(full),
        case("talk-small-step", options={**both, **small}, **talk),
        case("talk-small-step-full-mtp2", options={**full, **small}, **talk),
        case("talk-damage-states", options=both, damage={"states": []}, **talk),
        case("talk-damage-carry-mtp2", options={**both, **mtp(2)}, damage={"carry": []}, **talk),
        case("talk-damage-carry-full-mtp2", options=full, damage={"carry": []}, **talk),
    ]


def held_talk_cases(full: dict[str, Any]) -> list[dict[str, Any]]:
    """The same conversations over a TurboQuant cache: alone, and with prefixes and drafts."""
    held = {"kv_cache_dtype": f"turboquant_{PRESETS[0]}", "attention_config": {}}
    talk = {"talks": TALK_SEED, "long": True}
    step = {"max_num_batched_tokens": 8192}
    return [
        case("talk-tq-plain", options={**TALKING, **held, **step}, **talk),
        case("talk-tq-cache-full-mtp2", options={**full, **held, **step}, **talk),
    ]


def draft_cases() -> list[dict[str, Any]]:
    """One to three drafts of the 16-bit drafter, of one in INT4, and of a broken one."""
    found = [case("drafts-none", options={**ROOM, **graphs(FULL)}, recall=SHORTER)]
    for tree, short in ((NAME, "16bit"), (INT4_DRAFTS, "int4")):
        for drafts in (1, 2, 3):
            on = {**ROOM, **graphs(FULL), **mtp(drafts)}
            found.append(
                {**case(f"drafts-{short}-mtp{drafts}", options=on, recall=SHORTER), "tree": tree}
            )
    broken = {**ROOM, **mtp(2)}
    return [
        *found,
        case("drafts-damage", options=broken, damage={"drafts": []}, recall=SHORTER),
    ]


def flashinfer_cases() -> list[dict[str, Any]]:
    asked = {"recall": LENGTHS}
    attention = {**ROOM, "attention_config": {"backend": "FLASHINFER"}}
    gdn = {"additional": {"gdn_prefill_backend": "flashinfer"}}
    talking = {**TALKING, **CACHE}
    found = [
        case("fi-gdn", options=ROOM, **gdn, **asked),
        case("fi-gdn-full-mtp2", options={**ROOM, **graphs(FULL), **mtp(2)}, **gdn, **asked),
        case("fi-gdn-states", options=ROOM, damage={"states": []}, **gdn, recall=SHORTER),
    ]
    for mode, short in ((PIECEWISE, "piecewise"), (FULL, "full")):
        on = {**attention, **graphs(mode)}
        found += [
            case(f"fi-attention-{short}", options=on, fa2=True, **asked),
            case(f"fi-xqa-{short}", options=on, fa2=True, xqa=True, **asked),
        ]
    eager = {**attention, "enforce_eager": True}
    found += [
        case("fi-attention-eager", options=eager, fa2=True, **asked),
        case("fi-xqa-eager", options=eager, fa2=True, xqa=True, **asked),
        case("fi-hopper-full", options={**attention, **graphs(FULL)}, **asked),
    ]
    own: tuple[tuple[str, dict[str, Any]], ...] = (("attention", {}), ("xqa", {"xqa": True}))
    for way, more in own:
        again = {"options": {**attention, **graphs(FULL)}, "fa2": True, **asked, **more}
        blocking = {**again, "options": {**attention, **graphs(PIECEWISE)}, "environment": BLOCKING}
        found += [
            case(f"fi-{way}-full-again", **again),
            case(f"fi-{way}-piecewise-blocking", **blocking),
        ]
    drafting = {**attention, **graphs(FULL), **mtp(2)}
    found += [
        case("fi-attention-full-mtp2", options=drafting, fa2=True, **asked),
        case("fi-xqa-full-mtp2", options=drafting, fa2=True, xqa=True, **asked),
        case(
            "fi-attention-noise",
            options={**attention, "enforce_eager": True},
            fa2=True,
            damage={"noise": [1.0]},
            recall=SHORTER,
        ),
    ]
    full = {**talking, **graphs(FULL)}
    every = {**full, **mtp(2), "attention_config": {"backend": "FLASHINFER"}}
    talk = {"talks": TALK_SEED, "long": True}
    return [
        *found,
        case("fi-talk-plain", options=TALKING, **gdn, **talk),
        case("fi-talk-cache-full", options=full, **gdn, **talk),
        case("fi-talk-cache-full-mtp2", options={**full, **mtp(2)}, **gdn, **talk),
        case("fi-talk-attention-full-mtp2", options=every, fa2=True, **gdn, **talk),
        case("fi-talk-xqa-full-mtp2", options=every, fa2=True, xqa=True, **gdn, **talk),
    ]


def waiting_cases() -> list[dict[str, Any]]:
    """FlashInfer for attention without drafts, where the host waits for each step."""
    attention = {**ROOM, "attention_config": {"backend": "FLASHINFER"}, **NO_ASYNC}
    found = [case("fi-none", options=ROOM, recall=SHORTER)]
    for mode, on in (("eager", {}), ("full", graphs(FULL))):
        for way, more in (("attention", {}), ("xqa", {"xqa": True})):
            options = {**attention, **on}
            name = f"fi-{way}-{mode}-no-async"
            found.append(case(name, options=options, fa2=True, recall=SHORTER, **more))
    return found


STAGES = {
    "recall": recall_cases,
    "turboquant": turboquant_cases,
    "wide": wide_cases,
    "drafts": draft_cases,
    "prefixes": prefix_cases,
    "flashinfer": flashinfer_cases,
    "flashinfer-waiting": waiting_cases,
}
