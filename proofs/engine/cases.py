"""Engine runs of the basic stages."""

from typing import Any

from proofs.prompts import expected_answers
from proofs.trees import damages

SHARED_EXPERTS = (
    r"re:^language_model\.model\.layers\.\d+\.mlp\.shared_expert"
    r"\.(gate_proj|up_proj|down_proj)$"
)
ONLINE_FP8 = {"targets": {SHARED_EXPERTS: "fp8_per_block"}}
ONLINE: dict[str, Any] = {"plugins": "", "options": {"quantization_config": ONLINE_FP8}}
FIRST = ("overlay", "tiny-mtp2", "tiny-head8-piecewise-mtp2", "tiny-triton-full")
TRITON = {"spark": {"lm_head": "int8-triton", "lm_head_kernel": "own"}}

OTHER_PRESETS = ("4bit_nc", "k3v4_nc", "3bit_nc")


def case(name: str, tree: str, **more: Any) -> dict[str, Any]:
    options = {"enforce_eager": True, **more.pop("options", {})}
    prompts = "text" if tree.startswith("tiny") else "ids"
    return {"name": name, "tree": tree, "prompts": prompts, "options": options, **more}


def mtp(tokens: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": tokens}}


def graphs(mode: str) -> dict[str, Any]:
    return {"enforce_eager": False, "compilation_config": {"cudagraph_mode": mode}}


def eager_cases() -> list[dict[str, Any]]:
    hooks = {"hook_modules": True}
    return [
        case("reference", "wide-overlay", options={"load_format": "spark_portable"}),
        case("reference-head8", "wide-overlay-head8", options={"load_format": "spark_portable"}),
        case("full", "wide-full", **hooks),
        case("overlay", "wide-overlay", **hooks),
        case("full-head8", "wide-full-head8", **hooks),
        case("overlay-head8", "wide-overlay-head8", **hooks),
        case("overlay-fast", "wide-overlay", options={"load_format": "fastsafetensors"}),
        case("head-triton", "wide-overlay", additional=TRITON),
        case("plain-stock", "wide-base", plugins="", **hooks),
        case("plain-plugin", "wide-base", **hooks),
        case("native-stock", "wide-native", plugins="", **hooks),
        case("online-fp8-stock", "wide-base-head8", **ONLINE, **hooks),
        case("wrong-scale", "wide-full-wrong-scale", **hooks),
        case("swapped-layers", "wide-full-swapped-layers", **hooks),
    ]


def refused_cases() -> list[tuple[dict[str, Any], str]]:
    scale = "model.language_model.layers.1.mlp.shared_expert.{}_proj.weight_scale_inv"
    drafts = {"options": mtp(2), "capture": False}
    none = {"capture": False}
    return [
        (case("stock-refuses", "wide-full", plugins="", **none), "spark_inc"),
        (case("stock-refuses-overlay", "wide-overlay", plugins="", **none), "spark_inc"),
        (case("no-mtp-file", "wide-full-no-mtp-file", **drafts), "mtp."),
        (case("mtp-not-in-index", "wide-full-mtp-not-in-index", **drafts), "mtp."),
        (case("two-mtp-missing", "wide-full-two-mtp-tensors-missing", **drafts), "mtp.fc"),
        (case("no-up-scale", "wide-full-no-up-scale", **none), scale.format("up")),
        (case("no-down-scale", "wide-full-no-down-scale", **none), scale.format("down")),
        (
            case("overlay-no-up-scale", "wide-overlay-no-up-scale", **none),
            scale.format("up") + "_fp8",
        ),
        (case("no-block-names", "wide-full-no-block-names", **drafts), "block_name_to_quantize"),
        (case("experts-of-one-group", "narrow", **none), "experts are 128 wide on this device"),
        (case("triton-on-int8", "wide-overlay-head8", additional=TRITON, **none), "spark.lm_head"),
    ]


def nan_cases() -> list[tuple[dict[str, Any], str]]:
    """Return checkpoints with wrong numbers or counts; the engine must reject them by name.

    Counts and FP8 block scales are checked before loading, all other tensors after.
    """
    scale = "layers.1.mlp.shared_expert.up_proj.weight_scale_inv: "
    out = "layers.0.linear_attn.out_proj.scales"
    texts = {
        "wide-full": {
            "nan-fp8-weight": "layers.1.mlp.shared_expert.gate_up_proj.weight",
            "nan-fp8-scale": f"{scale}1 of ",
            "negative-fp8-scale": f"{scale}1 of ",
            "nan-int4-scale": out,
            "fp8-block-512": f"{scale}scale 0.09",
            "fp8-block-tiny": f"{scale}scale 1.",
            "fp8-module-512": f"{scale}scale 0.09",
            "fp8-module-tiny": f"{scale}scale 1.",
            "int4-group-512": f"language_model.model.{out}",
            "int4-module-512": f"language_model.model.{out}",
            "int4-module-tiny": f"language_model.model.{out}",
            "fewer-layers": "num_hidden_layers is 3",
            "fewer-experts": "num_experts is 4",
        },
        "wide-overlay-head8": {
            "nan-head-scale": "lm_head.scales",
            "head-group-512": "lm_head.scales",
            "head-512": "lm_head: logits of magnitude ",
        },
    }
    return [
        (case(name, f"{tree}-{name}", capture=False), text)
        for tree, damages in texts.items()
        for name, text in damages.items()
    ]


def damage_cases() -> list[dict[str, Any]]:
    """Return damage that no distribution reveals, for the questions of the start check."""
    more = {"prompt_count": len(expected_answers()), "tokens": 300, "capture": False}
    return [case(f"damage-{name}", f"tiny-full-head8-{name}", **more) for name in damages.TRAINED]


def speculation_cases() -> list[dict[str, Any]]:
    quiet = {"capture": False}
    cases = [
        case("tiny-reference", "tiny-overlay", options={"load_format": "spark_portable"}, **quiet),
        case("tiny-eager", "tiny-overlay", **quiet),
        case("tiny-head8", "tiny-overlay-head8", **quiet),
        case("tiny-triton", "tiny-overlay", additional=TRITON, **quiet),
        case("tiny-native", "tiny-native", plugins="", **quiet),
        case("tiny-online-fp8", "tiny-base-head8", **ONLINE, **quiet),
        *(case(f"tiny-mtp{n}", "tiny-overlay", options=mtp(n), **quiet) for n in (1, 2)),
    ]
    heads = {"head8": ("tiny-overlay-head8", {}), "triton": ("tiny-overlay", TRITON)}
    piecewise, full = graphs("PIECEWISE"), graphs("FULL_AND_PIECEWISE")
    modes: dict[str, dict[str, Any]] = {
        "mtp2": mtp(2),
        "piecewise": piecewise,
        "piecewise-mtp2": {**piecewise, **mtp(2)},
        "full": full,
        "full-mtp2": {**full, **mtp(2)},
    }
    cases += [
        case(f"tiny-{head}-{mode}", tree, options=options, additional=additional, **quiet)
        for head, (tree, additional) in heads.items()
        for mode, options in modes.items()
    ]
    alone = {"kv_cache_dtype": "turboquant_k8v4", "max_num_seqs": 1, "attention_config": {}}
    return [*cases, case("tiny-tq", "tiny-overlay-head8", options=alone, **quiet)]


def turboquant_cases() -> list[dict[str, Any]]:
    plain = {"kv_cache_dtype": "turboquant_k8v4", "attention_config": {}}
    quiet = {"capture": False, "long_last": True}
    stock = {"stock_turboquant": True}
    full = graphs("FULL_AND_PIECEWISE")
    tree = "tiny-overlay-head8"
    others = []
    for preset in OTHER_PRESETS:
        options = {**plain, "kv_cache_dtype": f"turboquant_{preset}"}
        others += [
            case(f"tq-{preset}-alone", tree, options={**options, "max_num_seqs": 1}, **quiet),
            case(f"tq-{preset}-full-mtp2", tree, options={**options, **full, **mtp(2)}, **quiet),
        ]
    return [
        *others,
        case("tq-alone", tree, options={**plain, "max_num_seqs": 1}, **quiet),
        case("tq-own", tree, options=plain, **quiet),
        case("tq-own-mtp2", tree, options={**plain, **mtp(2)}, **quiet),
        case("tq-own-full-mtp2", tree, options={**plain, **full, **mtp(2)}, **quiet),
        case("tq-stock", tree, options=plain, **stock, **quiet),
        case("tq-stock-mtp2", tree, options={**plain, **mtp(2)}, **stock, **quiet),
        case("tq-stock-full-mtp2", tree, options={**plain, **full, **mtp(2)}, **stock, **quiet),
    ]
