"""Paths of the engine's API that a gateway lets through, asks or is told about by name."""

from __future__ import annotations

from typing import Final

CHAT: Final = "/v1/chat/completions"
CLASSIFY: Final = "/v1/classify"
COMPLETIONS: Final = "/v1/completions"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
EMBEDDINGS: Final = "/v1/embeddings"
MESSAGES: Final = "/v1/messages"
MODELS: Final = "/v1/models"
POOLING: Final = "/v1/pooling"
RERANK: Final = "/v1/rerank"
RESPONSES: Final = "/v1/responses"
SCORE: Final = "/v1/score"

# Those that a service beside the main one may answer on the main one's gateway.
ROUTED = (EMBEDDINGS, RERANK, SCORE, CLASSIFY, POOLING)
