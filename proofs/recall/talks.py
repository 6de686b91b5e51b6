"""Conversations with known answers, typical for clients of a prefix cache.

The prompts of a round are sent at once and contain the right answers of earlier turns, so every
engine gets the same prompts.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from proofs.recall import language
from proofs.recall.language import Context, Question

FIRST_TURNS = (1504, 2336, 3008, 544, 4512, 7008)
"""Tokens of the clients' first contexts; blocks of the recall model have 272."""
MORE = (224, 1888, 416, 992)
KINDS = ("register", "record", "passage", "register", "record")
SHARED = 5024
LONG = 40_000
AGAIN = 3


@dataclass(frozen=True)
class Asked:
    client: str
    kind: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Talk:
    name: str
    source: np.random.Generator
    made: Context
    asked: list[Asked] = field(default_factory=list)

    def ask(self, kind: str) -> Asked:
        seed = int(self.source.integers(1 << 31))
        question = self._question(kind, seed)
        prompt = Asked(self.name, kind, [*self.made.tokens.tolist(), *question.tokens], [])
        prompt.answer.extend(question.answer)
        self.asked.append(prompt)
        appended = [*question.tokens, *question.answer]
        if kind == "register":
            appended = [*appended, *appended, language.PAD, language.PAD]
        made, untaught = self.made, np.full(len(appended), language.UNTAUGHT)
        self.made = replace(
            made,
            tokens=np.concatenate([made.tokens, appended]),
            labels=np.concatenate([made.labels, untaught]),
        )
        return prompt

    def _question(self, kind: str, seed: int) -> Question:
        questions = language.questions(self.made, seed, {kind: 5})
        if not questions:
            questions = language.questions(self.made, seed, {"record": 5})
        return questions[seed % len(questions)]

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


def start(name: str, seed: int, length: int) -> Talk:
    source = np.random.default_rng([seed, 3])
    made = language.context(source, length, near=False, asks=False, long=language.LONGER)
    return Talk(name, source, made)


def script(seed: int, *, long: bool = False) -> list[list[Asked]]:
    """Return all rounds; ``long`` adds a conversation of 40,000 tokens."""
    alone = start("alone", seed, 1216).ask("record")
    rounds = [[alone] for _ in range(AGAIN)]
    shared = start("shared", seed + 1, SHARED).made
    questions = language.questions(shared, seed, {"record": 4, "passage": 2, "register": 3})
    together = [
        Asked("shared", question.kind, [*shared.tokens.tolist(), *question.tokens], question.answer)
        for question in questions
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
    # Repeat early turns, mixed with other prompts, then the last turns.
    rounds.append([talk.asked[1] for talk in talks] + together[:3] + [alone])
    rounds.append([talk.asked[-1] for talk in talks] + together[3:])
    return rounds
