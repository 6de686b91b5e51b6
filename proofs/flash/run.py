"""Engines and judges of tables in files, quantized heads and drafts of Qwen4Exp."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proofs.engine.cases import graphs, mtp
from proofs.flash import model
from proofs.judges.answers import acceptance, attempt, compare_answers, failed_start, row
from proofs.prompts import IDS_LENGTHS, random_prompts

Row = dict[str, Any]
Results = dict[str, Row]
FIVE_DRAFTS = {"block_size": 288}
"""The ring of the indexer has 12 rows then, and must divide the attention's block."""
FULL = "FULL_AND_PIECEWISE"
ON_DEVICE: dict[str, Any] = {"engram_config": {"cpu_offload": False}}
IN_FILE = {"spark": {"ngram_table": "file", "ngram_cache_mib": 4}}
HEAD = {"spark": {**IN_FILE["spark"], "lm_head": "int8-triton", "lm_head_kernel": "own"}}


def case(name: str, tree: str, **more: Any) -> Row:
    options = {"enforce_eager": True, **ON_DEVICE, **more.pop("options", {})}
    options.setdefault("kv_cache_memory_bytes", 1 << 30)
    fixed = {"prompts": "ids", "ignore_eos": True, "tokens": 64, "additional": IN_FILE}
    return {"name": name, "tree": tree, **fixed, "options": options, **more}


def cases() -> list[Row]:
    stock: dict[str, Any] = {"plugins": "", "additional": {}}
    pinned: dict[str, Any] = {"options": {"engram_config": {"cpu_offload": True}}, **stock}
    quick = {"capture": False}
    full = graphs(FULL)
    return [
        case("stock-nvfp4", "flash-nvfp4", **stock),
        case("stock-nvfp4-again", "flash-nvfp4", **stock),
        case("stock-nvfp4-pinned", "flash-nvfp4", **pinned),
        case("stock-nvfp4-full", "flash-nvfp4", **stock, **quick, options=full),
        case("stock-fp8", "flash-fp8", **stock),
        case("stock-bf16", "flash-bf16", **stock),
        case("file", "flash-file"),
        case("file-fp8", "flash-file-fp8"),
        case("file-requantised", "flash-requantised"),
        case("file-full", "flash-file", options=full, **quick),
        case("file-full-again", "flash-file", options=full, **quick),
        case("file-piecewise", "flash-file", options=graphs("PIECEWISE"), **quick),
        case("flash", "flash"),
        case("flash-int8-head", "flash", additional=HEAD),
        case("flash-head8", "flash-head8"),
        case("flash-overlay", "flash-overlay"),
        *(
            case(f"file-full-mtp{n}", "flash-file", options={**full, **mtp(n), **more}, **quick)
            for n, more in ((1, {}), (2, {}), (3, {}), (4, {}), (5, FIVE_DRAFTS))
        ),
        case("file-mtp2", "flash-file", options=mtp(2), **quick),
        case("stock-mtp3", "flash-nvfp4", **stock, **quick, options={**full, **mtp(3)}),
        case("flash-full-mtp3", "flash", options={**full, **mtp(3)}, additional=HEAD, **quick),
        case("head8-full-mtp3", "flash-head8", options={**full, **mtp(3)}, **quick),
        case("overlay-full-mtp3", "flash-overlay", options={**full, **mtp(3)}, **quick),
        *(case(name, name, **quick) for name in damages()),
        case("without-option", "flash-file", additional={}, **quick),
        case("option-without-file", "flash-nvfp4", **quick),
    ]


def two_gpu_cases() -> list[Row]:
    stock: dict[str, Any] = {"plugins": "", "additional": {}}
    size = model.TEXT["vocab_size"]
    more: dict[str, Any] = {"capture": False, "vocabulary": size}
    # As between two Sparks: only NCCL, no direct path between the cards.
    more["environment"] = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    one = {"max_logprobs": size}
    two = {**one, "tensor_parallel_size": 2, "disable_custom_all_reduce": True}
    drafts = {"capture": False, "options": {**two, **graphs(FULL), **mtp(2)}}
    return [
        case("stock", "flash-nvfp4", **stock, **more, options=one),
        case("stock-tp2", "flash-nvfp4", **stock, **more, options=two),
        case("file", "flash-file", **more, options=one),
        case("file-tp2", "flash-file", **more, options=two),
        case("file-tp2-full-mtp2", "flash-file", environment=more["environment"], **drafts),
        case("moved-rows", "moved-rows", **more, options=two),
        case("damaged-blocks", "damaged-blocks", **more, options=two),
    ]


def _table(tree: Path) -> Path:
    return tree / f"ngram-table-{model.TABLE_LAYER}.bin"


def _flip(tree: Path) -> None:
    """Damage every block: which ones a prompt reads depends on hashes."""
    content = bytearray(_table(tree).read_bytes())
    for start in range(4096, len(content), 4096):
        content[start + 100] ^= 1
    _table(tree).write_bytes(content)


def _swap_rows(tree: Path) -> None:
    """Move every row by one, with correct checksums: rows of a wrong table."""
    import zlib

    content = bytearray(_table(tree).read_bytes())
    for number in range(1, len(content) // 4096):
        block = content[number * 4096 : (number + 1) * 4096 - 4]
        moved = block[90 : 45 * 90] + block[:90] + block[45 * 90 :]
        sealed = moved + zlib.crc32(moved, number).to_bytes(4, "little")
        content[number * 4096 : (number + 1) * 4096] = sealed
    _table(tree).write_bytes(content)


def _truncate(tree: Path) -> None:
    content = _table(tree).read_bytes()
    _table(tree).write_bytes(content[: len(content) // 2])


def _wrong_expert(tree: Path) -> None:
    """Make an expert's scales eight times as large, below the limit of the check at load."""
    import numpy as np

    from proofs.trees.build import rewrite, stored_bytes

    for layer in range(4):
        name = f"{model.LAYERS}.{layer}.mlp.experts.0.down_proj.scales"
        scales = np.frombuffer(stored_bytes(tree, name), "<f2")
        rewrite(tree, name, (scales * np.float16(8)).tobytes())


def _wrong_head(tree: Path) -> None:
    """Roll the rows of the head by one."""
    import numpy as np

    from proofs.trees.build import rewrite, stored_bytes

    rows = np.frombuffer(stored_bytes(tree, "lm_head.weight"), "<u2").reshape(1024, -1)
    rewrite(tree, "lm_head.weight", np.roll(rows, 1, axis=0).tobytes())


def damages() -> dict[str, Callable[[Path], None]]:
    return {
        "damaged-blocks": _flip,
        "moved-rows": _swap_rows,
        "truncated-table": _truncate,
        "missing-table": lambda tree: _table(tree).unlink(),
        "wrong-expert-scale": _wrong_expert,
        "wrong-head": _wrong_head,
    }


def make_damaged(trees: Path) -> None:
    for name, change in damages().items():
        shutil.copytree(trees / "flash-file", trees / name)
        change(trees / name)


def read_logits(work: Path, name: str) -> Any:
    import torch

    return torch.load(work / f"{name}.pt")["logits"].float()


def judge_equal_logits(results: Results, work: Path, first: str, second: str) -> Row:
    import torch

    one, two = read_logits(work, first), read_logits(work, second)
    differing = int((one != two).any(dim=-1).sum())
    return row(
        f"{second} has the logits of {first}, bit for bit",
        bool(torch.equal(one, two)),
        [first, second],
        rows=len(one),
        differing_rows=differing,
        largest_difference=float((one - two).abs().max()),
    )


def judge_near_logits(
    results: Results, work: Path, first: str, second: str, limit: float, same_tokens: float
) -> Row:
    one, two = read_logits(work, first), read_logits(work, second)
    error = float((one - two).norm() / one.norm())
    agree = float((one.argmax(-1) == two.argmax(-1)).float().mean())
    return row(
        f"{second} is near {first}",
        error <= limit and agree >= same_tokens,
        [first, second],
        relative_error=round(error, 4),
        limit=limit,
        same_best_token=round(agree, 4),
    )


def judge_transformers(work: Path, trees: Path) -> Row:
    """Compare the engine's logits of the 16-bit tree with transformers' own model."""
    import torch
    from transformers import Qwen4ExpForConditionalGeneration

    reference = Qwen4ExpForConditionalGeneration.from_pretrained(
        trees / "flash-bf16", dtype=torch.bfloat16
    ).cuda()
    recorded = torch.load(work / "stock-bf16.pt")
    engine_rows, reference_rows = [], []
    for prompt, rows in zip(
        random_prompts(IDS_LENGTHS),
        recorded["logits"].float().split(recorded["rows"]),
        strict=True,
    ):
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([prompt]).cuda()).logits[0].float().cpu()
        count = len(prompt) - 1  # the last row is computed apart, for sampling
        starts = range(len(rows) - count + 1)
        start = min(starts, key=lambda n: float((rows[n : n + count] - logits[:count]).norm()))
        engine_rows.append(rows[start : start + count])
        reference_rows.append(logits[:count])
    engine, logits = torch.cat(engine_rows), torch.cat(reference_rows)
    error = float((engine - logits).norm() / logits.norm())
    agree = float((engine.argmax(-1) == logits.argmax(-1)).float().mean())
    return row(
        "transformers gives the engine's logits for the same weights",
        error < 0.05 and agree > 0.97,
        ["stock-bf16"],
        relative_error=round(error, 4),
        same_best_token=round(agree, 4),
        rows=len(logits),
    )


def judge_same_answers(results: Results, first: str, second: str, claim: str) -> Row:
    compared = compare_answers(results[first], results[second])
    return row(claim, not compared["beyond_margin"], [first, second], **compared)


def judge_drafts(results: Results, name: str, reference: str) -> Row:
    compared = compare_answers(results[reference], results[name])
    rate = acceptance(results[name]) or 0.0
    return row(
        f"{name}: drafts are accepted and change no answer",
        0.2 < rate < 0.98 and not compared["beyond_margin"],
        [reference, name],
        acceptance=rate,
        counters=results[name]["counters"],
        **compared,
    )


def judge_damage(results: Results, name: str, text: str) -> Row:
    result = results[name]
    said = f"{result.get('error', '')} {result.get('log_tail', '')} {result['log_lines']}"
    stopped = result["state"] in ("died", "refused") and text in said
    return row(f"{name} stops the engine", stopped, [name], state=result["state"], text=text)


def judge_changed(results: Results, name: str, reference: str = "file") -> Row:
    compared = compare_answers(results[reference], results[name])
    # Intact engines differ by at most 0.02.
    by_much = compared["largest_noise"] > 0.1 or max(compared["margins_there"], default=0) > 1
    changed = compared["diverged"] > 0 and by_much
    return row(f"{name} changes answers", changed, [reference, name], **compared)


def judge_all(results: Results, work: Path, trees: Path) -> list[Row]:
    stopped = {
        "damaged-blocks": "is damaged",
        "truncated-table": "bytes",
        "missing-table": "lacks ngram-table",
        "without-option": "has ngram-table",
        "option-without-file": "lacks ngram-table",
    }
    changed = ("moved-rows", "wrong-expert-scale", "wrong-head")
    rows = [
        failed_start(name, result)
        for name, result in results.items()
        if name not in stopped and result["state"] != "ran"
    ]
    equal = [
        ("stock-nvfp4", "stock-nvfp4-again"),
        ("stock-nvfp4", "stock-nvfp4-pinned"),
        ("stock-nvfp4", "file"),
        ("stock-fp8", "file-fp8"),
    ]
    near = [
        ("file-fp8", "file-requantised", 0.15, 0.9),
        ("file", "flash", 0.1, 0.95),
        ("flash", "flash-int8-head", 0.02, 0.98),
        ("file", "flash-head8", 0.02, 0.98),
        ("flash", "flash-overlay", 0.02, 0.98),
    ]
    rows += [attempt(b, judge_equal_logits, results, work, a, b) for a, b in equal]
    rows += [attempt(b, judge_near_logits, results, work, a, b, *m) for a, b, *m in near]
    rows.append(attempt("transformers", judge_transformers, work, trees))
    for name in ("file-full", "file-full-again", "file-piecewise", "stock-nvfp4-full"):
        claim = f"{name} gives the answers of the stock engine without graphs"
        rows.append(attempt(claim, judge_same_answers, results, "stock-nvfp4", name, claim))
    for name, reference in [
        *((f"file-full-mtp{n}", "file-full") for n in (1, 2, 3, 4, 5)),
        ("file-mtp2", "file"),
        ("stock-mtp3", "stock-nvfp4-full"),
        ("flash-full-mtp3", "flash-int8-head"),
        ("head8-full-mtp3", "flash-head8"),
        ("overlay-full-mtp3", "flash-overlay"),
    ]:
        rows.append(attempt(name, judge_drafts, results, name, reference))
    rows += [attempt(name, judge_damage, results, name, text) for name, text in stopped.items()]
    return rows + [attempt(name, judge_changed, results, name) for name in changed]


def judge_two_gpus(results: Results, work: Path, _: Path) -> list[Row]:
    near, answers = (0.03, 0.97), "the answers of one GPU and of two are the same"
    return [
        *(
            failed_start(n, r)
            for n, r in results.items()
            if n != "damaged-blocks" and "answers" not in r
        ),
        attempt("stock-tp2", judge_near_logits, results, work, "stock", "stock-tp2", *near),
        attempt(
            "stock-tp2", judge_same_answers, results, "stock", "stock-tp2", f"stock: {answers}"
        ),
        attempt("file-tp2", judge_near_logits, results, work, "file", "file-tp2", *near),
        attempt("file-tp2", judge_same_answers, results, "file", "file-tp2", f"file: {answers}"),
        attempt("file-tp2", judge_equal_logits, results, work, "stock-tp2", "file-tp2"),
        attempt("file-tp2-full-mtp2", judge_drafts, results, "file-tp2-full-mtp2", "file-tp2"),
        attempt("moved-rows", judge_changed, results, "moved-rows", "file-tp2"),
        attempt("damaged-blocks", judge_damage, results, "damaged-blocks", "is damaged"),
    ]
