import json
from pathlib import Path
from typing import Any

import torch
from spark_vllm.checkpoint import names
from spark_vllm.checkpoint.reader import ModuleReader
from spark_vllm.checkpoint.settings import read_settings

from proofs.engine.cases import OTHER_PRESETS
from proofs.judges.answers import (
    TURBOQUANT_NOISE,
    Row,
    attempt,
    compare_answers,
    judge_same_answers,
    row,
    show,
)

LM_HEAD = "language_model.lm_head"
FP8_LIMIT = 0.006
"""Error of an FP8 module against a reference that rounds activations as the kernel does."""
INT_LIMIT = 0.004
"""Error of an INT4, INT8 or 16-bit module against the dequantized weight: BF16 rounding."""
LEAST_ACCEPTANCE = 0.4
"""For two drafts of the trained model, measured 0.48; without drafter weights almost 0."""
LOGIT_LIMIT = 0.15
"""Error of four layers' logits against the same bytes dequantized; measured about 0.06."""


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    value, reference = value.double(), reference.double()
    return float((value - reference).norm() / reference.norm())


class Weights:
    def __init__(self, tree: Path) -> None:
        config = json.loads((tree / "config.json").read_text())["quantization_config"]
        config.setdefault("fp8_block", {"modules": [], "block_shape": [128, 128]})
        config["quant_method"] = "spark_inc"
        settings = read_settings(config)
        reader = ModuleReader(tree, settings)
        wanted = ("_proj", "in_proj_", "lm_head")
        self._weights = dict(
            reader.read_weights(
                lambda name: (
                    any(part in name for part in wanted)
                    and "mtp" not in name
                    and ".experts." not in name
                )
            )
        )
        self._reader = reader

    def of(self, module: str) -> torch.Tensor:
        name = module.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        shards = names.fused_shards(name, names.FUSED)
        return torch.cat([self._weights[f"{shard}.weight"] for shard in shards])


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    groups = x.float().view(x.shape[0], -1, 128)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view_as(x)


def module_errors(result: Row, capture: dict[str, Any], weights: Weights) -> dict[str, Any]:
    worst: dict[str, tuple[float, str]] = {}
    for module, (x, y) in capture["modules"].items():
        if module.endswith(".mlp"):
            continue
        chain = result["modules"][module]["method"]
        kind = "fp8" if chain[0].startswith("Fp8") else f"{chain[0]} > {chain[-1]}"
        weight = weights.of(module).float()
        plain = relative(y, x.double() @ weight.double().t())
        error = plain
        if kind == "fp8":
            error = relative(y, rounded_activations(x).double() @ weight.double().t())
            worst["fp8, activations not rounded"] = max(
                worst.get("fp8, activations not rounded", (0.0, "")), (plain, module)
            )
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, module))
    return {kind: {"worst": round(e, 5), "module": m} for kind, (e, m) in sorted(worst.items())}


def judge_eager(results: dict[str, Row], out: Path, trees: Path) -> list[Row]:
    capture = {
        name: torch.load(out / f"{name}.pt") for name in results if (out / f"{name}.pt").exists()
    }
    weights = {
        name: Weights(trees / tree)
        for name, tree in (
            ("full", "wide-full"),
            ("overlay-head8", "wide-overlay-head8"),
            ("native-stock", "wide-native"),
        )
    }
    equal = (
        ("full", "overlay"),
        ("full-head8", "overlay-head8"),
        ("overlay", "overlay-fast"),
        ("plain-stock", "plain-plugin"),
    )
    near = (
        ("overlay", "reference"),
        ("overlay-head8", "reference-head8"),
        ("head-triton", "reference"),
        ("native-stock", "reference"),
        ("online-fp8-stock", "overlay-head8"),
        ("plain-stock", "reference"),
    )
    full, head8 = weights["full"], weights["overlay-head8"]
    return [
        *(attempt(f"dispatch {n}", _judge_dispatch, results, n) for n in ("full", "overlay")),
        *(
            attempt(f"modules {n}", judge_modules, results, capture, weights[n], n)
            for n in ("full", "native-stock")
        ),
        *(
            attempt(damage, _judge_damage, results, capture, full, damage)
            for damage in ("wrong-scale", "swapped-layers")
        ),
        *(attempt(f"{n} = {o}", _judge_equality, results, capture, n, o) for n, o in equal),
        *(attempt(f"{n} ~ {o}", _judge_logits, capture, n, o) for n, o in near),
        attempt("head8", lambda: _compare_head(capture, "overlay-head8", head8.of(LM_HEAD))),
        attempt("triton head", _judge_triton_head, capture, full),
        attempt("untouched", _judge_unchanged_classes, results),
    ]


def _judge_dispatch(results: dict[str, Row], name: str) -> Row:
    modules = results[name]["modules"]
    fp8 = {m: v for m, v in modules.items() if v["method"][0] == "Fp8LinearMethod"}
    layers = 4
    wanted = {
        f"language_model.model.layers.{n}.mlp.shared_expert.{part}"
        for n in range(layers)
        for part in ("gate_up_proj", "down_proj")
    }
    passed = set(fp8) == wanted and all(
        v["parameters"].get("weight") == "float8_e4m3fn"
        and v["parameters"].get("weight_scale_inv") == "float32"
        for v in fp8.values()
    )
    others = sorted({f"{v['class']}: {' > '.join(v['method'])}" for v in modules.values()})
    line = [text for text in results[name]["log_lines"] if "spark_inc:" in text]
    return row(
        f"{name}: FP8 exactly in the swapped modules, the rest as INC decides",
        passed and bool(line),
        [name],
        fp8_modules=len(fp8),
        kernels=sorted({v["method"][-1] for v in fp8.values()}),
        log=line[:1],
        classes=others,
    )


def judge_modules(results: Any, capture: Any, weights: Weights, name: str) -> Row:
    errors = module_errors(results[name], capture[name], weights)
    passed = all(
        value["worst"] <= (FP8_LIMIT if kind == "fp8" else INT_LIMIT)
        for kind, value in errors.items()
        if "not rounded" not in kind
    )
    return row(
        f"{name}: every module equals the dequantised weight",
        passed,
        [name],
        errors=errors,
        classes=sorted({" > ".join(v["method"]) for v in results[name]["modules"].values()}),
    )


def _judge_damage(results: Any, capture: Any, weights: Weights, name: str) -> Row:
    errors = module_errors(results[name], capture[name], weights)
    return row(
        f"{name}: the module test detects the damage",
        errors["fp8"]["worst"] > 10 * FP8_LIMIT,
        [name],
        errors=errors,
    )


def _judge_equality(results: Any, capture: Any, name: str, other: str) -> Row:
    first, second = capture[name], capture[other]
    equal = {key: bool(torch.equal(first[key], second[key])) for key in ("hidden", "logits")}
    return row(
        f"{name} and {other} agree bit for bit",
        all(equal.values()),
        [name, other],
        **equal,
        greedy=compare_answers(results[name], results[other]),
        difference=relative(first["logits"], second["logits"]),
    )


def _judge_logits(capture: Any, name: str, reference: str) -> Row:
    error = relative(capture[name]["logits"], capture[reference]["logits"])
    return row(
        f"{name}: logits near {reference}",
        error < LOGIT_LIMIT,
        [name, reference],
        logit_error=round(error, 4),
        limit=LOGIT_LIMIT,
    )


def _compare_top_tokens(logits: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    """The median error is robust against a single wrong logit."""
    logits, reference = logits.double(), reference.double()
    errors = (logits - reference).abs()
    usual = 1.4826 * errors.median(-1).values
    top = reference.topk(2, dim=-1)
    margin = top.values[:, 0] - top.values[:, 1]
    differ = logits.argmax(-1) != top.indices[:, 0]
    return {
        "rows": len(logits),
        "top_differs": int(differ.sum()),
        "beyond_margin": int((differ & (margin > 12 * usual)).sum()),
        "largest_error": float(errors.max()),
    }


def _judge_triton_head(capture: Any, weights: Weights) -> Row:
    from spark_vllm.head.compute import dequantize_rows, quantize_rows

    weight = weights.of(LM_HEAD)
    own = dequantize_rows(*quantize_rows(weight), weight.shape[1])
    result_row = _compare_head(capture, "head-triton", own)
    hidden, logits = capture["head-triton"]["hidden"], capture["head-triton"]["logits"]
    against = relative(logits, hidden.double() @ weight.double().t())
    result_row["numbers"]["against_bf16"] = round(against, 5)
    return result_row


def _compare_head(capture: Any, name: str, weight: torch.Tensor) -> Row:
    hidden, logits = capture[name]["hidden"], capture[name]["logits"]
    reference = hidden.double() @ weight.double().t()
    error, margins = relative(logits, reference), _compare_top_tokens(logits, reference)
    return row(
        f"{name}: head equals the dequantised weight",
        error < INT_LIMIT and not margins["beyond_margin"],
        [name],
        error=round(error, 5),
        **margins,
    )


def _judge_unchanged_classes(results: Any) -> Row:
    same = results["plain-stock"]["modules"] == results["plain-plugin"]["modules"]
    return row(
        "plain auto-round: the plugin changes no class", same, ["plain-stock", "plain-plugin"]
    )


def judge_refused(results: dict[str, Row], wanted: dict[str, str]) -> list[Row]:
    rows = []
    for name, text in wanted.items():
        result = results.get(name, {"state": "not run"})
        errors = " | ".join(result.get("error", []))
        rows.append(
            row(
                f"{name}: refused, naming {text}",
                result["state"] == "refused" and text in errors,
                [name],
                seconds=result.get("seconds"),
                error=errors[:400] or result["state"],
            )
        )
    return rows


def judge_speculation(results: dict[str, Row]) -> list[Row]:
    pairs = {
        "tiny-eager": "tiny-reference",
        "tiny-head8": "tiny-eager",
        "tiny-triton": "tiny-eager",
        "tiny-native": "tiny-reference",
        "tiny-online-fp8": "tiny-head8",
        "tiny-mtp1": "tiny-eager",
        "tiny-mtp2": "tiny-eager",
        "tiny-tq": "tiny-head8",
    }
    for name in results:
        for head in ("head8", "triton"):
            if name.startswith(f"tiny-{head}-"):
                pairs[name] = f"tiny-{head}"
    return [judge_trained_answers(results, *pair) for pair in pairs.items()]


def judge_trained_answers(results: dict[str, Row], name: str, reference: str) -> Row:
    """Judge answers of the trained model; an engine with MTP must accept drafts."""
    return attempt(
        name,
        judge_same_answers,
        results,
        name,
        reference,
        f"greedy answers equal {reference} outside ties",
        accepts=lambda share: "mtp" not in name or (share or 0) > LEAST_ACCEPTANCE,
    )


def judge_turboquant(results: dict[str, Row]) -> list[Row]:
    runs = {name: "tq-alone" for name in ("tq-own", "tq-own-mtp2", "tq-own-full-mtp2")}
    runs |= {f"tq-{preset}-full-mtp2": f"tq-{preset}-alone" for preset in OTHER_PRESETS}
    stock = ("tq-stock", "tq-stock-mtp2", "tq-stock-full-mtp2")
    claim = "greedy answers equal a single sequence outside ties"
    rows = [
        attempt(name, judge_same_answers, results, name, alone, claim, max_noise=TURBOQUANT_NOISE)
        for name, alone in {**runs, **dict.fromkeys(stock, "tq-alone")}.items()
    ]
    claim = "the stock backend for comparison, not judged"
    shown = zip(stock, rows[len(runs) :], strict=True)
    return rows[: len(runs)] + [show(result_row, f"{name}: {claim}") for name, result_row in shown]
