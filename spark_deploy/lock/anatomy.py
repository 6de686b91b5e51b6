"""Read the headers and config.json of a repository that is served as it was published."""

from __future__ import annotations

from dataclasses import replace

from spark_contract import documents
from spark_contract.documents import DocumentError
from spark_contract.orders import ALL_DOCUMENTS, CONFIG, DESCRIBE, LEAVE_OUT, Described

from spark_deploy.config.catalog.anatomy import Anatomy, CacheLayers
from spark_deploy.config.errors import LockError
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock.kv_cache_spec import Missing, Numbers, cache_layers
from spark_deploy.lock.verify_names import workplace

# A sum of headers above this is no model, and would overflow what is computed from it.
_MOST_BYTES = 1 << 50


def read_anatomy(
    repository: str, commit: str, hub: HubSettings, *, leave_out: tuple[str, ...] = ()
) -> Anatomy:
    """Return what the files of a repository's commit say; no byte of its weights is read.

    Raises:
        HubSilent: The hub did not send them.
        LockError: They are not those of a model.
    """
    found = ask_hub(f"{repository}@{commit}", hub, leave_out=leave_out)
    return replace(anatomy_of(repository, found), leave_out=leave_out)


def ask_hub(
    place: str, hub: HubSettings, *, leave_out: tuple[str, ...] = (), all_documents: bool = False
) -> Described:
    """Return what a repository says of itself, as the builder of this checkout reads it."""
    words = [f"{LEAVE_OUT}={pattern}" for pattern in leave_out]
    words += [ALL_DOCUMENTS] if all_documents else []
    with workplace(hub) as builder:
        said = builder.ask(DESCRIBE, *words, place)
    try:
        return documents.parse(Described, said)
    except DocumentError as error:
        what = f"the reader's answer is malformed: {error}"
        raise LockError.one(place, what, "restore the checkout (git status)") from error


def anatomy_of(repository: str, found: Described) -> Anatomy:
    """Return headers and config.json as the numbers that plans are made of."""
    where = f"{repository}@{found.commit[:12]}: {CONFIG}"
    config = Numbers(where, found.documents.get(CONFIG, {}))
    sizes = {part: sum(by_dtype.values()) for part, by_dtype in found.parts.items()}
    if sum(sizes.values()) > _MOST_BYTES:
        what = f"headers add up to {sum(sizes.values())} bytes"
        raise LockError.one(where, what, "choose another commit of the repository")
    cache: tuple[CacheLayers, ...] = ()
    unknown = ""
    try:
        cache = cache_layers(config)
    except Missing as missing:
        unknown = str(missing)
    return Anatomy(
        repository=repository,
        commit=found.commit,
        architecture=_architecture(config),
        model_type=config.text("model_type"),
        quantisation=quantisation_of(config),
        weights=found.parts.get("text", {}),
        repeats_names=found.repeats_names,
        vision_bytes=sizes.get("vision", 0),
        drafter_bytes=sizes.get("drafter", 0),
        context_tokens=config.count("max_position_embeddings", "n_positions", "max_seq_len")
        or None,
        width=config.count("hidden_size", "n_embd", "d_model") or None,
        expert_width=config.count("moe_intermediate_size") or None,
        cache=cache,
        cache_unknown=unknown,
    )


def _architecture(config: Numbers) -> str:
    # Of the whole configuration: a part of it names the class of that part.
    named = config.outer("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    fits = isinstance(first, str) and len(first) <= 100 and first.isidentifier()
    return first if fits else ""


def quantisation_of(config: Numbers) -> str:
    """Return how weights are stored, in a few words; empty when the configuration says nothing."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(said, dict):
        return ""
    words = Numbers(config.where, said)
    told = (words.text(key) for key in ("quant_method", "quant_algo", "format", "fmt"))
    bits = said.get("bits")
    counted = f"{bits} bit" if type(bits) is int and 0 < bits < 64 else ""
    return ", ".join(dict.fromkeys(word for word in (*told, counted) if word))
