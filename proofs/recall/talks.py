"""Conversations whose every answer is known: what clients of a prefix cache do.

A script is a list of rounds; the prompts of a round are sent at once. Later prompts contain the
right answers to earlier ones, so every engine is asked the same, whatever it said before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from proofs.recall import language
from proofs.recall.language import Context, Question

FIRST_TURNS = (1504, 2336, 3008, 544, 4512, 7008)
"""Tokens of the clients' first contexts; blocks of the recall model have 272."""
MORE = (224, 1888, 416, 992)
"""Tokens that a turn adds."""
KINDS = ("register", "record", "passage", "register", "record")
SHARED = 5024
LONG = 40_000
AGAIN = 3


@dataclass(frozen=True)
class Asked:
    """One prompt of a round."""

    client: str
    kind: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Talk:
    """A conversation that grows."""

    name: str
    source: np.random.Generator
    made: Context
    asked: list[Asked] = field(default_factory=list)

    def ask(self, kind: str) -> Asked:
        seed = int(self.source.integers(1 << 31))
        question = self._question(kind, seed)
        asked = Asked(self.name, kind, [*self.made.tokens.tolist(), *question.tokens], [])
        asked.answer.extend(question.answer)
        self.asked.append(asked)
        said = [*question.tokens, *question.answer]
        if kind == "register":  # a slot holds two readings
            said = [*said, *said, language.PAD, language.PAD]
        self.made = _joined(self.made, np.array(said))
        return asked

    def _question(self, kind: str, seed: int) -> Question:
        found = language.questions(self.made, seed, {kind: 5})
        if not found:  # a short context without passages
            found = language.questions(self.made, seed, {"record": 5})
        return found[seed % len(found)]

    def add(self, length: int) -> None:
        more = language.context(self.source, length, near=False, asks=False, long=language.LONGER)
        offset = len(self.made.tokens)
        registers = np.where(more.registers >= 0, more.registers, self.made.registers)
        self.made = Context(
            np.concatenate([self.made.tokens, more.tokens]),
            np.concatenate([self.made.labels, more.labels]),
            np.concatenate([self.made.records, more.records + offset]),
            np.concatenate([self.made.passages, more.passages + offset]),
            registers,
            self.made.long,
        )


def _joined(made: Context, tokens: language.Ints) -> Context:
    return Context(
        np.concatenate([made.tokens, tokens]),
        np.concatenate([made.labels, np.full(len(tokens), language.UNTAUGHT)]),
        made.records,
        made.passages,
        made.registers,
        made.long,
    )


def start(name: str, seed: int, length: int) -> Talk:
    """Return a conversation with its first context."""
    source = np.random.default_rng([seed, 3])
    return Talk(
        name, source, language.context(source, length, near=False, asks=False, long=language.LONGER)
    )


def script(seed: int, *, long: bool = False) -> list[list[Asked]]:
    """Return all rounds.

    Args:
        seed: of everything.
        long: also a conversation of 40,000 tokens.
    """
    alone = start("alone", seed, 1216).ask("record")
    rounds = [[alone] for _ in range(AGAIN)]
    shared = start("shared", seed + 1, SHARED).made
    found = language.questions(shared, seed, {"record": 4, "passage": 2, "register": 3})
    together = [
        Asked("shared", one.kind, [*shared.tokens.tolist(), *one.tokens], one.answer)
        for one in found
    ]
    rounds += [together, list(reversed(together))]
    talks = [
        start(f"client{number}", seed + 10 + number, size)
        for number, size in enumerate(FIRST_TURNS)
    ]
    if long:
        talks.append(start("long", seed + 50, LONG))
    for turn in range(4):
        rounds.append([])
        for number, talk in enumerate(talks):
            if turn:
                talk.add(MORE[(turn + number) % len(MORE)])
            rounds[-1].append(talk.ask(KINDS[(turn + number) % len(KINDS)]))
    # Back to where each of them was, others beside it, then the last turns once more.
    rounds.append([talk.asked[1] for talk in talks] + together[:3] + [alone])
    rounds.append([talk.asked[-1] for talk in talks] + together[3:])
    return rounds
