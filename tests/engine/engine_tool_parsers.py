"""Parse texts with the engine's parsers; run by the engine's Python.

Arguments: a file of requests, a file for the messages (both JSON), and a folder with the parsers of
another release, if wanted.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

_TAGS = re.compile(r"<\|?/?(?:think|tool_call|im_start|im_end)\|?>")


class Tokenizer:
    """A token for each tag, and for each piece of up to four characters."""

    def __init__(self, text: str, seed: int) -> None:
        self.pieces, place, pick = list[str](), 0, random.Random(seed)
        while place < len(text):
            tag = _TAGS.match(text, place)
            following = _TAGS.search(text, place)
            limit = following.start() if following else len(text)
            end = tag.end() if tag else min(limit, place + pick.randint(1, 4))
            self.pieces.append(text[place:end])
            place = end
        tags = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"]
        self.vocab = {
            piece: number for number, piece in enumerate(dict.fromkeys(tags + self.pieces))
        }
        self.texts = list(self.vocab)
        self.all_special_tokens: list[str] = []

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.vocab[text]] if text in self.vocab else []

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(self.texts[number] for number in ids)


def parse(case: dict[str, Any], seed: int) -> dict[str, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    tokenizer = Tokenizer(case["text"], seed)
    options = {"enable_thinking": case["thinking"]}
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=case["tools"],
        tool_choice="auto", chat_template_kwargs=options,
    )  # fmt: skip
    names = case["parsers"]
    parser_class = ParserManager.get_parser(names["tool_call"], names["reasoning"], True)
    parser = parser_class(tokenizer, request.tools, chat_template_kwargs=options)
    ids = [tokenizer.vocab[piece] for piece in tokenizer.pieces]
    if not case["stream"]:
        reasoning, content, calls = parser.parse(case["text"], request, True, ids)
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls or ()]
        return {"reasoning": reasoning, "content": content or "", "tool_calls": functions}
    pick, place, deltas = random.Random(seed), 0, []
    prompt = [tokenizer.vocab["<think>"]] + (
        [] if case["thinking"] else [tokenizer.vocab["</think>"]]
    )
    while place < len(ids):
        end = min(len(ids), place + pick.randint(1, 3))  # a step with accepted drafts
        delta = parser.parse_delta(
            "".join(tokenizer.pieces[place:end]), ids[place:end], request, prompt,
            finished=end == len(ids),
        )  # fmt: skip
        deltas += [delta.model_dump(exclude_none=True)] if delta else []
        place = end
    return {"deltas": deltas}


def main(requests: str, answers: str, *other_release: str) -> None:
    import vllm

    vllm.__path__[:0] = [f"{folder}/vllm" for folder in other_release]
    cases = json.loads(Path(requests).read_text())
    Path(answers).write_text(json.dumps([parse(case, n) for n, case in enumerate(cases)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
