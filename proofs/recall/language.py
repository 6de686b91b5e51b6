"""The language of the recall model: contexts full of things to find again, and questions.

Everything lies in slots of eight tokens, so a context is made with array operations:

    record    REC a b VAL v v v END      a pair of words, and three that belong to it
    question  ASK a b VAL v v v END      the same words for a pair met before
    passage   REC a b VAL v ...... END   the same over 4 or 16 slots: 27 or 123 words to repeat
    register  SET r x SET r x PAD PAD    the value of a register, from now on
    reading   GET r x GET r x PAD PAD    the value it was given last
    filler    eight random words

Records and passages stand once in a context of tens of thousands of tokens, and there are more of
them than a state of fixed size can hold: they have to be found in the cache of attention.
Registers are written over and over: the last value is what a linear layer's state is for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

VOCABULARY = 512
REC, ASK, VAL, END, SET, GET, PAD = range(1, 8)
REGISTERS = 16
FIRST_REGISTER = 32
FIRST_WORD = 64
WORDS = VOCABULARY - FIRST_WORD
SLOT = 8
LONG, LONGER = 4, 16  # slots of a passage
VALUES = SLOT - 5
UNTAUGHT = -100
"""Label of a token that cannot be known."""
SHARES = {"record": 0.42, "question": 0.3, "set": 0.12, "get": 0.1}
"""Share of each kind of slot; the rest is filler."""
PASSAGE_SHARE = 0.12
"""Share of the slots that belong to passages, half of them to repetitions."""


@dataclass(frozen=True)
class Context:
    """Tokens, what of them can be known from those before, and where things stand.

    Attributes:
        tokens: one context, a multiple of 32 long.
        labels: the token where it can be known, else ``UNTAUGHT``.
        records: first token of every record.
        passages: first token of every passage.
        registers: value of each register at the end; -1 where it was never set.
        long: slots of a passage.
    """

    tokens: Ints
    labels: Ints
    records: Ints
    passages: Ints
    registers: Ints
    long: int = LONG


@dataclass(frozen=True)
class Question:
    """Tokens that ask for something in a context, the answer, and how deep it lies (0: start)."""

    kind: str
    tokens: list[int]
    answer: list[int]
    depth: float


def _pairs(source: np.random.Generator, count: int, near: bool) -> Ints:
    """Return different pairs of words; ``near``: of so few words that most pairs share one."""
    words = max(24, int(np.sqrt(4 * count)) + 1) if near else WORDS
    words = min(words, WORDS)
    chosen = source.permutation(WORDS)[:words] + FIRST_WORD
    numbers = np.unique(source.integers(0, words * words, 2 * count + 64))
    if len(numbers) < count:
        numbers = np.arange(words * words)
    numbers = source.permutation(numbers)[:count]
    found: Ints = np.stack([chosen[numbers // words], chosen[numbers % words]], axis=1)
    return found


def _earlier(source: np.random.Generator, given: Ints, asked: Ints) -> Ints:
    """Return for each place of ``asked`` the index of a random smaller one in ``given``, or -1."""
    before = np.searchsorted(given, asked)
    chosen: Ints = (source.random(len(asked)) * before).astype(np.int64)
    chosen[before == 0] = -1
    return chosen


def context(
    source: np.random.Generator, length: int, *, near: bool, asks: bool = True, long: int = LONG
) -> Context:
    """Return one random context.

    Args:
        source: where the randomness comes from.
        length: tokens; a multiple of 32.
        near: pairs differ in one word only.
        asks: with questions, readings and repetitions inside; without, everything stands once.
        long: slots of a passage.
    """
    slots = length // SLOT
    tokens = source.integers(FIRST_WORD, VOCABULARY, (slots, SLOT))
    labels = np.full((slots, SLOT), UNTAUGHT)
    kinds = source.choice(5, slots, p=[*SHARES.values(), 1 - sum(SHARES.values())])
    if not asks:
        kinds[(kinds == 1) | (kinds == 3)] = 0
    whole = slots // long * long
    groups = source.random(slots // long)
    passages = np.flatnonzero(groups < PASSAGE_SHARE / 2)
    repeated = np.flatnonzero((groups >= 0.5) & (groups < 0.5 + PASSAGE_SHARE / 2))
    if not asks:
        repeated = repeated[:0]
    for chosen in (passages, repeated):
        kinds[:whole].reshape(-1, long)[chosen] = 5
    short = np.flatnonzero(kinds == 0)
    pairs = _pairs(source, len(short) + len(passages), near)
    _put_records(source, tokens, labels, kinds, short, pairs[: len(short)])
    grouped = [array[:whole].reshape(-1, long * SLOT) for array in (tokens, labels)]
    _put_passages(source, grouped[0], grouped[1], passages, repeated, pairs[len(short) :])
    registers = _put_registers(source, tokens, labels, kinds)
    starts = passages * long * SLOT
    return Context(tokens.reshape(-1), labels.reshape(-1), short * SLOT, starts, registers, long)


def _put_records(
    source: np.random.Generator, tokens: Ints, labels: Ints, kinds: Ints, short: Ints, pairs: Ints
) -> None:
    tokens[short, 0], tokens[short, 3], tokens[short, 7] = REC, VAL, END
    tokens[short, 1:3] = pairs
    asked = np.flatnonzero(kinds == 1)
    meant = _earlier(source, short, asked)
    asked, meant = asked[meant >= 0], meant[meant >= 0]
    tokens[asked] = tokens[short[meant]]
    tokens[asked, 0] = ASK
    labels[asked, 4:] = tokens[asked, 4:]


def _put_passages(
    source: np.random.Generator,
    tokens: Ints,
    labels: Ints,
    passages: Ints,
    repeated: Ints,
    pairs: Ints,
) -> None:
    tokens[passages, 0], tokens[passages, 3], tokens[passages, -1] = REC, VAL, END
    tokens[passages, 1:3] = pairs
    meant = _earlier(source, passages, repeated)
    repeated, meant = repeated[meant >= 0], meant[meant >= 0]
    tokens[repeated] = tokens[passages[meant]]
    tokens[repeated, 0] = ASK
    labels[repeated, 4:] = tokens[repeated, 4:]


def _put_registers(source: np.random.Generator, tokens: Ints, labels: Ints, kinds: Ints) -> Ints:
    """Write settings and readings, two in a slot; return the values at the end."""
    held = np.flatnonzero((kinds == 2) | (kinds == 3))
    registers = source.integers(0, REGISTERS, (len(held), 2)).reshape(-1)
    is_set = np.repeat(kinds[held] == 2, 2)
    values = source.integers(FIRST_WORD, VOCABULARY, len(registers))
    last = np.full(REGISTERS, -1)
    known = np.ones(len(registers), dtype=bool)
    order = np.arange(len(registers))
    for register in range(REGISTERS):
        mine = np.flatnonzero(registers == register)
        latest = np.maximum.accumulate(np.where(is_set[mine], order[mine], -1))
        reads = ~is_set[mine]
        known[mine[reads]] = latest[reads] >= 0
        found = reads & (latest >= 0)
        values[mine[found]] = values[latest[found]]
        if len(mine) and latest[-1] >= 0:
            last[register] = values[latest[-1]]
    values[~known] = PAD  # a register never set reads as padding
    tokens[held, 6:] = PAD
    for half in range(2):
        tokens[held, 3 * half] = np.where(is_set[half::2], SET, GET)
        tokens[held, 3 * half + 1] = registers[half::2] + FIRST_REGISTER
        tokens[held, 3 * half + 2] = values[half::2]
        labels[held, 3 * half + 2] = np.where(is_set[half::2], UNTAUGHT, values[half::2])
    return last


def batch(seed: int, rows: int, length: int) -> tuple[Ints, Ints]:
    """Return (tokens, labels), each ``[rows, length]``, the same for the same seed."""
    source = np.random.default_rng(seed)
    made = [
        context(
            source,
            length,
            near=bool(source.random() < 0.5),
            long=LONGER if source.random() < 0.5 else LONG,
        )
        for _ in range(rows)
    ]
    return np.stack([one.tokens for one in made]), np.stack([one.labels for one in made])


def positions(seed: int, rows: int, length: int, span: int) -> Ints:
    """Return rising positions ``[rows, length]`` below ``span``: random jumps between slots.

    So a model taught with short contexts meets every distance it will be asked at.
    """
    source = np.random.default_rng([seed, 1])
    slots = length // SLOT
    room = (span - length) * source.random((rows, 1)) ** 2
    cuts = np.sort(source.random((rows, slots)), axis=1)
    jumps = np.floor(cuts * room).astype(np.int64)
    return np.repeat(jumps, SLOT, axis=1) + np.arange(length)


def questions(made: Context, seed: int, kinds: dict[str, int]) -> list[Question]:
    """Return questions on a context, spread evenly over its depth.

    Args:
        made: the context.
        seed: which of the records near each depth is asked for.
        kinds: how many of ``record``, ``passage`` and ``register``.
    """
    source = np.random.default_rng([seed, 2])
    found = []
    for kind, places, values in (
        ("record", made.records, VALUES),
        ("passage", made.passages, made.long * SLOT - 5),
    ):
        count = min(kinds.get(kind, 0), len(places))
        for part in np.array_split(places, count) if count else []:
            start = int(source.choice(part))
            tokens = made.tokens[start : start + 5 + values].tolist()
            depth = start / len(made.tokens)
            found.append(Question(kind, [ASK, *tokens[1:4]], tokens[4:], depth))
    ready = np.flatnonzero(made.registers >= 0)[: kinds.get("register", 0)]
    for register in ready:
        asked = [GET, FIRST_REGISTER + int(register)]
        found.append(Question("register", asked, [int(made.registers[register])], 1.0))
    return found
