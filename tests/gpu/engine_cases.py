"""The engine runs that the proofs are made of, as data."""

from __future__ import annotations

from typing import Any

SHARED_EXPERTS = (
    r"re:^language_model\.model\.layers\.\d+\.mlp\.shared_expert"
    r"\.(gate_proj|up_proj|down_proj)$"
)
ONLINE_FP8 = {"targets": {SHARED_EXPERTS: "fp8_per_block"}}
FIRST = ("overlay", "tiny-mtp2", "tiny-head8-piecewise-mtp2", "tiny-triton-full")
"""Cases that between them compile almost every kernel of their stage."""
TRITON = {"spark": {"lm_head": "int8-triton"}}


def _case(name: str, tree: str, **more: Any) -> dict[str, Any]:
    options = {"enforce_eager": True, **more.pop("options", {})}
    prompts = "ids" if tree.startswith("wide") else "text"
    return {"name": name, "tree": tree, "prompts": prompts, "options": options, **more}


def _mtp(tokens: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": tokens}}


def _graphs(mode: str) -> dict[str, Any]:
    return {"enforce_eager": False, "compilation_config": {"cudagraph_mode": mode}}


def eager_cases() -> list[dict[str, Any]]:
    """Numbers on the wide random tree: one engine per way of serving, all eager."""
    hooks = {"hook_modules": True}
    return [
        _case("reference", "wide-overlay", options={"load_format": "spark_portable"}),
        _case("reference-head8", "wide-overlay-head8", options={"load_format": "spark_portable"}),
        _case("full", "wide-full", **hooks),
        _case("overlay", "wide-overlay", **hooks),
        _case("full-head8", "wide-full-head8", **hooks),
        _case("overlay-head8", "wide-overlay-head8", **hooks),
        _case("overlay-fast", "wide-overlay", options={"load_format": "fastsafetensors"}),
        _case("head-triton", "wide-overlay", additional=TRITON),
        _case("plain-stock", "wide-base", plugins="", **hooks),
        _case("plain-plugin", "wide-base", **hooks),
        _case("native-stock", "wide-native", plugins="", **hooks),
        _case(
            "online-fp8-stock",
            "wide-base-head8",
            plugins="",
            options={"quantization_config": ONLINE_FP8},
            **hooks,
        ),
        _case("wrong-scale", "wide-full-wrong-scale", **hooks),
        _case("swapped-layers", "wide-full-swapped-layers", **hooks),
    ]


def refused_cases() -> list[tuple[dict[str, Any], str]]:
    """Engines that must not start, with a text their error has to contain."""
    scale = "model.language_model.layers.1.mlp.shared_expert.{}_proj.weight_scale_inv"
    mtp = {"options": _mtp(2), "capture": False}
    none = {"capture": False}
    return [
        (_case("stock-refuses", "wide-full", plugins="", **none), "spark_inc"),
        (_case("stock-refuses-overlay", "wide-overlay", plugins="", **none), "spark_inc"),
        (_case("no-mtp-file", "wide-full-no-mtp-file", **mtp), "mtp."),
        (_case("mtp-not-in-index", "wide-full-mtp-not-in-index", **mtp), "mtp."),
        (_case("two-mtp-missing", "wide-full-two-mtp-tensors-missing", **mtp), "mtp.fc"),
        (_case("no-up-scale", "wide-full-no-up-scale", **none), scale.format("up")),
        (_case("no-down-scale", "wide-full-no-down-scale", **none), scale.format("down")),
        (
            _case("overlay-no-up-scale", "wide-overlay-no-up-scale", **none),
            scale.format("up") + "_fp8",
        ),
        (_case("no-block-names", "wide-full-no-block-names", **mtp), "block_name_to_quantize"),
        (
            _case("triton-on-int8", "wide-overlay-head8", additional=TRITON, **none),
            "spark.lm_head",
        ),
    ]


def speculation_cases() -> list[dict[str, Any]]:
    """Speculation, heads and graphs on the trained model."""
    quiet = {"capture": False}
    cases = [
        _case("tiny-reference", "tiny-overlay", options={"load_format": "spark_portable"}, **quiet),
        _case("tiny-eager", "tiny-overlay", **quiet),
        _case("tiny-head8", "tiny-overlay-head8", **quiet),
        _case("tiny-triton", "tiny-overlay", additional=TRITON, **quiet),
        _case("tiny-native", "tiny-native", plugins="", **quiet),
        _case(
            "tiny-online-fp8",
            "tiny-base-head8",
            plugins="",
            options={"quantization_config": ONLINE_FP8},
            **quiet,
        ),
    ]
    for tokens in (1, 2):
        cases.append(_case(f"tiny-mtp{tokens}", "tiny-overlay", options=_mtp(tokens), **quiet))
    heads = {"head8": ("tiny-overlay-head8", {}), "triton": ("tiny-overlay", TRITON)}
    for head, (tree, additional) in heads.items():
        cases.append(
            _case(f"tiny-{head}-mtp2", tree, options=_mtp(2), additional=additional, **quiet)
        )
        for mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
            for spec in ({}, _mtp(2)):
                name = f"tiny-{head}-{mode.lower().replace('_and_piecewise', '')}"
                cases.append(
                    _case(
                        name + ("-mtp2" if spec else ""),
                        tree,
                        options={**_graphs(mode), **spec},
                        additional=additional,
                        **quiet,
                    )
                )
    cases.append(
        _case(
            "tiny-tq",
            "tiny-overlay-head8",
            options={
                "kv_cache_dtype": "turboquant_k8v4",
                "max_num_seqs": 1,
                "attention_config": {},
            },
            **quiet,
        )
    )
    return cases


def turboquant_cases() -> list[dict[str, Any]]:
    """TurboQuant on the trained model: the engine's own backend beside ours."""
    plain = {"kv_cache_dtype": "turboquant_k8v4", "attention_config": {}}
    quiet = {"capture": False, "long_last": True}
    stock = {"stock_turboquant": True}
    graphs = _graphs("FULL_AND_PIECEWISE")
    tree = "tiny-overlay-head8"
    return [
        _case("tq-alone", tree, options={**plain, "max_num_seqs": 1}, **quiet),
        _case("tq-own", tree, options=plain, **quiet),
        _case("tq-own-mtp2", tree, options={**plain, **_mtp(2)}, **quiet),
        _case("tq-own-full-mtp2", tree, options={**plain, **graphs, **_mtp(2)}, **quiet),
        _case("tq-stock", tree, options=plain, **stock, **quiet),
        _case("tq-stock-mtp2", tree, options={**plain, **_mtp(2)}, **stock, **quiet),
        _case("tq-stock-full-mtp2", tree, options={**plain, **graphs, **_mtp(2)}, **stock, **quiet),
    ]
