"""A model with known tokens and a known acceptance rate.

The target's next token is a permutation of the last token. Embeddings use the first half of the
channels for ordinary tokens and the second half for *odd* tokens; the drafter's last norm drops the
second half, so drafts after odd tokens are wrong. The layers stay random, so that states and caches
affect every logit.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.model import original
from lab.model.original import Floats
from lab.model.shape import Shape

EMBEDDING_RMS = 1.0
ODD_RMS = 2.0
TOP_LOGIT = 14.0


@dataclass(frozen=True)
class Steering:
    following: npt.NDArray[np.int64]
    odd: npt.NDArray[np.bool_]


def steering(shape: Shape, seed: int, odd_share: float) -> Steering:
    """Return a permutation with a single cycle and the tokens after which drafts are wrong."""
    source = np.random.default_rng(seed)
    cycle = source.permutation(shape.vocabulary)
    following = np.empty(shape.vocabulary, dtype=np.int64)
    following[cycle] = np.roll(cycle, -1)
    return Steering(following, source.random(shape.vocabulary) < odd_share)


def weights(shape: Shape, seed: int, known: Steering) -> dict[str, Floats]:
    tensors = original.random_weights(shape, seed)
    source = np.random.default_rng(seed + 1)
    half = shape.hidden // 2
    embedding = np.zeros((shape.vocabulary, shape.hidden), dtype=np.float32)
    embedding[:, :half] = source.normal(0, EMBEDDING_RMS, (shape.vocabulary, half))
    odd = source.normal(0, ODD_RMS, (int(known.odd.sum()), half))
    embedding[known.odd, :half] = 0
    embedding[known.odd, half:] = odd
    rms = np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    head = np.empty_like(embedding)
    # A hidden state is normed before the head, so the top logit is about TOP_LOGIT everywhere.
    head[known.following] = embedding / rms * TOP_LOGIT / shape.hidden
    tensors["model.language_model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = head
    only_embedding = np.zeros((shape.hidden, 2 * shape.hidden), dtype=np.float32)
    only_embedding[:, : shape.hidden] = np.eye(shape.hidden)
    tensors["mtp.fc.weight"] = only_embedding
    dropped = np.zeros(shape.hidden, dtype=np.float32)
    dropped[half:] = -1
    tensors["mtp.norm.weight"] = dropped
    return tensors


def expected_tokens(known: Steering, last: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        last = int(known.following[last])
        tokens.append(last)
    return tokens


def expected_acceptance(known: Steering, tokens: list[int], drafts: int) -> tuple[int, int]:
    accepted = drafted = place = 0
    while place < len(tokens) - 1:
        right = 0
        while right < drafts and not known.odd[tokens[min(place + right, len(tokens) - 1)]]:
            right += 1
        accepted, drafted = accepted + right, drafted + drafts
        place += right + 1
    return accepted, drafted
