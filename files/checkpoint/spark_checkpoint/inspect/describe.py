"""``describe ORG/NAME``: what an engine would load of a repository, summed from its headers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from spark_contract.work.orders import Described

from spark_checkpoint.errors import GateRefused
from spark_checkpoint.inspect.anatomy import examine
from spark_checkpoint.inspect.inspection import Subject

# The first that is found in a name says which part of a model it belongs to.
_PARTS = {
    "drafter": re.compile(r"(^|\.)mtp(_block)?\."),
    "vision": re.compile(
        r"(^|\.)(visual|vision_\w+|vit|audio_\w+|multi_modal_projector|mm_projector|"
        r"embed_vision|embed_audio|patch_merg\w+|image_newline|mlp1)(\.|$)"
    ),
}
_LAYER = re.compile(r"(^|\.)layers\.(\d{1,6})\.")


def describe(subject: Subject) -> Described:
    """Return what headers and documents say; of files beside an index, those of the index count."""
    loaded = set(subject.index.values()) if subject.index else set(subject.shards)
    if gone := sorted(loaded - subject.shards.keys()):
        what = f"its index names {len(gone)} files that it does not hold, {gone[0][:60]!r} first"
        raise GateRefused(subject.place, what, "name another commit: no engine could load this one")
    shards = {name: header for name, header in subject.shards.items() if name in loaded}
    found = examine(shards, None)
    own_drafter = _first_drafter_layer(subject.config)
    parts: dict[str, Counter[str]] = {part: Counter() for part in ("text", *_PARTS)}
    for name, tensor in found.names.items():
        parts[_part(name, own_drafter)][tensor.dtype] += tensor.size_bytes
    return Described(
        commit=subject.place.rpartition("@")[2],
        parts={part: dict(sorted(sizes.items())) for part, sizes in parts.items()},
        tensors=len(found.names),
        repeats_names=bool(found.duplicates),
        files=dict(sorted(subject.files.items())),
        documents={path: dict(said) for path, said in subject.documents.items()},
    )


def _part(name: str, own_drafter: int | None) -> str:
    layer = _LAYER.search(name)
    if own_drafter is not None and layer and int(layer[2]) >= own_drafter:
        return "drafter"
    return next((part for part, said in _PARTS.items() if said.search(name)), "text")


def _first_drafter_layer(config: Mapping[str, Any]) -> int | None:
    """Return the layer from which on a model keeps its drafter, as DeepSeek and GLM do."""
    text = config.get("text_config")
    numbers = {**config, **(text if isinstance(text, dict) else {})}
    layers, drafts = (numbers.get(k) for k in ("num_hidden_layers", "num_nextn_predict_layers"))
    counted = type(layers) is int and type(drafts) is int and drafts > 0
    return layers if counted else None
