"""What the files of a repository say of themselves, at one commit: headers and config.json.

The lock keeps it, because it is a fact about a commit and nobody's choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic.json_schema import SkipJsonSchema
from spark_contract.units import COMMIT

from spark_deploy.config.documents.declare import needed, of_key, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayers:
    """Layers of a model that keep the same of a request."""

    kind: Literal["full", "sliding", "latent", "state"] = needed(
        "full and sliding: keys and values; latent: what MLA keeps; state: one for each request."
    )
    layers: int = needed("How many.", minimum=1)
    token_bytes: int = setting(0, "Of one layer and token, in 16 bit.", minimum=0)
    window_tokens: int = setting(0, "How far a sliding window reaches.", minimum=0)
    state_bytes: int = setting(0, "Of one layer and request.", minimum=0)
    draft_state_bytes: int = setting(0, "Of these, more for each draft token.", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCache:
    """What an engine said of a cache that nobody could compute, in its first start on a host."""

    kv_cache: str = needed("Type of the cache that it counted.")
    context_tokens: int = needed("Longest context that it was started with.", minimum=1)
    token_bytes: int = needed("Bytes of one token over all layers.", minimum=1)
    by: str = needed("Host and release whose proof holds it.", maxLength=200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What headers and config.json of one commit say."""

    repository: SkipJsonSchema[str] = of_key()
    commit: str = needed("The commit that was read.", pattern=f"^{COMMIT}$")
    leave_out: tuple[str, ...] = setting(
        (), "Shell patterns of files that were not looked at, because nobody fetches them."
    )
    architecture: str = setting("", "Class that config.json names.")
    model_type: str = setting("", "Type that config.json names.")
    quantisation: str = setting("", "How config.json says weights are stored; empty: it does not.")
    weights: dict[str, int] = setting(
        dict,
        "Bytes that are always loaded, by dtype.",
        additionalProperties={"type": "integer", "minimum": 0},
    )
    repeats_names: bool = setting(False, "Files hold some tensors twice.")
    vision_bytes: int = setting(0, "Towers and projectors of pictures and sound.", minimum=0)
    drafter_bytes: int = setting(0, "The model's own layers of speculation.", minimum=0)
    context_tokens: int | SkipJsonSchema[None] = setting(
        None, "Longest context of config.json.", minimum=1
    )
    width: int | SkipJsonSchema[None] = setting(None, "hidden_size.", minimum=1)
    expert_width: int | SkipJsonSchema[None] = setting(None, "moe_intermediate_size.", minimum=1)
    cache: tuple[CacheLayers, ...] = setting((), "What layers keep of a request.")
    cache_unknown: str = setting(
        "", "Why nobody here can say what they keep; empty when the cache is known."
    )
    counted: CountedCache | SkipJsonSchema[None] = setting(
        None, "What an engine counted where the cache is not known; `lock --counted` writes it."
    )

    @property
    def weights_bytes(self) -> int:
        """Bytes that are always loaded."""
        return sum(self.weights.values())
