"""Repositories beside a model's own, fetched, verified and counted as it is: drafter, adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from pydantic.json_schema import SkipJsonSchema

from spark_deploy.config.catalog.anatomy import Anatomy
from spark_deploy.config.documents import CLOSED, Violation, form

HUB_REPOSITORY = form(
    "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
    "ORG/NAME as the hub has it, without its address", "Qwen/Qwen3-0.6B",
)  # fmt: skip
HubRepository = Annotated[str, Field(json_schema_extra=HUB_REPOSITORY)]
# Which methods draft with weights of another repository.
OF_A_REPOSITORY = ("dflash", "eagle3", "draft_model")
_MOST_MTP_TOKENS = 8


def is_repository(name: str) -> bool:
    """Whether a hub could have a repository of this name; none is as long as 200 characters."""
    return len(name) < 200 and bool(re.fullmatch(str(HUB_REPOSITORY["pattern"]), name))


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Speculation:
    """Draft tokens that the model only has to confirm."""

    method: Literal["mtp", "dflash", "eagle3", "ngram", "draft_model"]
    """How drafts are made. mtp: by layers of the model's own, which some publish in a repository
    apart; dflash and eagle3: by a drafter made for this model; draft_model: by a smaller model with
    the same vocabulary; ngram: by words that follow elsewhere in the same request, without
    weights."""
    tokens: int = Field(ge=1, le=16)
    """Draft tokens in each step."""
    repository: HubRepository | None = None
    """The drafter's repository of the model hub; needed by dflash, eagle3 and draft_model."""
    revision: str = "main"
    """Of that repository: branch, tag or commit."""
    longest_match: int | None = Field(default=None, ge=1, le=64)
    """With ngram: most words that are looked for."""
    shortest_match: int | None = Field(default=None, ge=1, le=64)
    """With ngram: fewest words that are looked for."""
    # What the drafter's files say at the locked commit; nobody writes it.
    anatomy: SkipJsonSchema[Anatomy | None] = None

    @property
    def by_own_layers(self) -> bool:
        """Whether the model's own tree holds what drafts."""
        return self.method == "mtp" and self.repository is None

    def broken(self) -> Iterator[Violation]:
        """Yield what does not fit the method."""
        if self.method in OF_A_REPOSITORY and self.repository is None:
            what = f"is needed by {self.method}: its weights are not the model's"
            yield Violation(("repository",), what, "name the drafter's repository")
        if self.method == "ngram" and self.repository is not None:
            what = "ngram drafts without weights"
            yield Violation(("repository",), what, "leave it out, or choose another method")
        if self.method == "mtp" and self.tokens > _MOST_MTP_TOKENS:
            what = f"{self.tokens} are more than one layer can draft to any use"
            yield Violation(("tokens",), what, f"draft {_MOST_MTP_TOKENS} or fewer")
        for key in ("longest_match", "shortest_match"):
            if self.method != "ngram" and getattr(self, key) is not None:
                yield Violation((key,), f"{self.method} looks for no words", "leave it out")
        if (self.shortest_match or 0) > (self.longest_match or 64):
            what = f"{self.shortest_match} is above longest_match {self.longest_match}"
            yield Violation(("shortest_match",), what, "make it as small or smaller")


@dataclass(frozen=True, slots=True, kw_only=True, config=CLOSED)
class Adapter:
    """A LoRA adapter that is served under a name of its own beside the model."""

    repository: HubRepository
    """Repository of the model hub."""
    revision: str = "main"
    """Branch, tag or commit that the lock starts from."""
    rank: int = Field(ge=1, le=512)
    """`r` of its adapter_config.json."""
    # What its files say at the locked commit; nobody writes it.
    anatomy: SkipJsonSchema[Anatomy | None] = None
