"""A repository as a file of the catalog: what its own files say, and what a table knows."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from spark_contract.work.orders import CONFIG, GENERATION, TOKENIZER, Described

from spark_deploy.catalog.anatomy import Anatomy
from spark_deploy.catalog.engines import Engines
from spark_deploy.catalog.families import Families
from spark_deploy.cli.adding.draft import Draft

# Other formats of the same weights, which the engine does not read.
_OTHER_FORMATS = ("original/*", "metal/*", "onnx/*", "openvino/*", "*.gguf", "consolidated*")
_MOST_BYTES = 1 << 50  # no file is larger
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Card:
    """What the hub says of a repository beside its files."""

    license: str = ""
    gated: bool = False
    task: str = ""  # the hub's word: text-generation, sentence-similarity, ...


def draft_of(
    anatomy: Anatomy, found: Described, card: Card, engines: Engines, families: Families, asked: str
) -> Draft:
    """Return the file of a repository; ``asked`` is the revision that somebody named."""
    draft = Draft(anatomy.repository, anatomy.commit)
    draft.about = list(_about(anatomy, found, card, asked))
    task = task_of(anatomy, found, card, engines)
    if task != "chat":
        draft.put("task", task, _WHY_TASK[task])
    if anatomy.vision_bytes and anatomy.architecture.endswith("ForConditionalGeneration"):
        draft.put("vision", True, "It has a tower for pictures; `engine.vision: on` uses it.")
    if isinstance(found.documents.get(CONFIG, {}).get("audio_config"), dict):
        draft.put(
            "audio", True, "config.json describes a tower for sounds; the proof asks with two."
        )
    patterns = [
        one for one in _OTHER_FORMATS
        if any(fnmatch.fnmatchcase(path, one) for path in found.files)
    ]  # fmt: skip
    if patterns and any(path.startswith("model") for path in found.files):
        draft.put("leave_out", patterns, "The same weights in other formats; not fetched.")
    if task == "chat":
        _parsers(draft, anatomy, families)
    draft.open += list(_open(anatomy, found))
    return draft


def _parsers(draft: Draft, anatomy: Anatomy, families: Families) -> None:
    family = families.of(anatomy.model_type, anatomy.repository)
    if family is None:
        said = anatomy.model_type or "no model_type"
        draft.open.append(f"parsers: none is known for {said}; tool calls and thinking stay text")
        return
    parsers = {"reasoning": family.reasoning, "tool_call": family.tool_call}
    draft.put("parsers", {k: v for k, v in parsers.items() if v}, f"From {family.source}.")
    checks = {"tool_call": bool(family.tool_call), "reasoning": bool(family.reasoning)}
    draft.put(
        "check",
        {**{k: True for k, on in checks.items() if on}, "conversation": True},
        "Asked beside the questions that any instruct model answers.",
    )


_WHY_TASK = {
    "completion": "Without a chat template it goes on with texts; there is no chat.",
    "embedding": "The repository or the hub calls it a model for embeddings.",
    "reranking": "The repository or the hub calls it a model that ranks documents.",
    "classification": "The hub calls it a model that sorts texts into classes.",
}


def task_of(anatomy: Anatomy, found: Described, card: Card, engines: Engines) -> str:
    """Return what a repository is for, by its files first."""
    name = anatomy.repository.lower()
    if card.task == "text-ranking" or "rerank" in name:
        return "reranking"
    if card.task in ("text-classification", "zero-shot-classification"):
        return "classification"
    embeds = card.task in ("sentence-similarity", "feature-extraction")
    if embeds or "modules.json" in found.files or "embedding" in name:
        return "embedding"
    named = anatomy.architecture
    if any(named in one.pools and named not in one.generates for one in engines.engines.values()):
        return "embedding"
    template = found.documents.get(TOKENIZER, {}).get("chat_template")
    has_file = any(path.startswith("chat_template.") for path in found.files)
    return "chat" if template or has_file else "completion"


def _about(anatomy: Anatomy, found: Described, card: Card, asked: str) -> Iterator[str]:
    total = sum(size for size in found.files.values() if size and 0 < size < _MOST_BYTES)
    yield (
        f"Written by `spark-deploy add` from {anatomy.repository} at {asked}, which was commit "
        f"{anatomy.commit[:12]}. Nobody proved it yet: a deploy does."
    )
    yield f"licence: {card.license or 'the hub names none'}" + (", gated" if card.gated else "")
    yield (
        f"architecture: {anatomy.architecture or 'not named'}, weights "
        f"{anatomy.quantisation or 'not quantised'}; {total / 1e9:.1f} GB of files, "
        f"{anatomy.weights_bytes / 1e9:.1f} GB of weights always loaded, "
        f"{anatomy.vision_bytes / 1e9:.1f} GB for pictures or sound, "
        f"{anatomy.drafter_bytes / 1e9:.1f} GB of a drafter of its own"
    )
    if anatomy.context_tokens:
        yield f"context: {anatomy.context_tokens:,} tokens"
    sampling = found.documents.get(GENERATION, {})
    numbers = {key: sampling.get(key) for key in _SAMPLING}
    said = [f"{key} {value}" for key, value in numbers.items() if _is_small(value)]
    if said:
        yield f"sampling that its publisher advises (the engine takes it): {', '.join(said)}"


def _is_small(value: object) -> bool:
    """Whether it is a number that somebody could mean; not true, infinite or half a page long."""
    return type(value) in (int, float) and abs(value) < 10**6  # type: ignore[arg-type]


def _open(anatomy: Anatomy, found: Described) -> Iterator[str]:
    if anatomy.cache_unknown:
        yield f"KV cache of a token: {anatomy.cache_unknown}; pin engine.kv_cache_gib to be sure"
    if anatomy.drafter_bytes:
        yield "speculation: it has a drafter of its own; how many drafts pay is for you to measure"
    if found.documents.get("config.json", {}).get("auto_map"):
        yield "config.json names code of its own; it is not fetched, the engine's own class is used"
