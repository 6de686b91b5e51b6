"""The language of the recall model: contexts with facts to recall, and questions.

A context consists of slots of eight tokens:

    record    REC a b VAL v v v END      a pair of words, and three that belong to it
    question  ASK a b VAL v v v END      the same words for an earlier pair
    passage   REC a b VAL v ...... END   the same over 4 or 16 slots: 27 or 123 words to repeat
    register  SET r x SET r x PAD PAD    the value of a register, from now on
    reading   GET r x GET r x PAD PAD    the latest value
    filler    eight random words

Records and passages occur once and exceed the capacity of a fixed-size state, so they must be found
in the attention cache. Registers are overwritten: the latest value is the task of a linear layer's
state.
"""

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
LONG, LONGER = 4, 16
VALUES = SLOT - 5
UNTAUGHT = -100
SHARES = {"record": 0.42, "question": 0.3, "set": 0.12, "get": 0.1}
PASSAGE_SHARE = 0.12
"""Share of the slots that belong to passages, half of them to repetitions."""


@dataclass(frozen=True)
class Context:
    """Tokens (a multiple of 32), labels, and the positions of facts.

    Attributes:
        labels: the token if predictable, otherwise ``UNTAUGHT``.
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
    kind: str
    tokens: list[int]
    answer: list[int]
    depth: float


def _pairs(source: np.random.Generator, count: int, near: bool) -> Ints:
    words = max(24, int(np.sqrt(4 * count)) + 1) if near else WORDS
    words = min(words, WORDS)
    chosen = source.permutation(WORDS)[:words] + FIRST_WORD
    numbers = np.unique(source.integers(0, words * words, 2 * count + 64))
    if len(numbers) < count:
        numbers = np.arange(words * words)
    numbers = source.permutation(numbers)[:count]
    pairs: Ints = np.stack([chosen[numbers // words], chosen[numbers % words]], axis=1)
    return pairs


def _earlier(source: np.random.Generator, given: Ints, places: Ints) -> Ints:
    """Return for each of ``places`` the index of a random smaller value in ``given``, or -1."""
    before = np.searchsorted(given, places)
    chosen: Ints = (source.random(len(places)) * before).astype(np.int64)
    chosen[before == 0] = -1
    return chosen


def context(
    source: np.random.Generator, length: int, *, near: bool, asks: bool = True, long: int = LONG
) -> Context:
    """Return a random context of ``length`` tokens, a multiple of 32.

    ``near``: pairs differ in a single word. ``asks``: with questions, readings and repetitions;
    without them facts occur once. ``long``: slots of a passage.
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
    questions = np.flatnonzero(kinds == 1)
    meant = _earlier(source, short, questions)
    questions, meant = questions[meant >= 0], meant[meant >= 0]
    tokens[questions] = tokens[short[meant]]
    tokens[questions, 0] = ASK
    labels[questions, 4:] = tokens[questions, 4:]


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
    slots = np.flatnonzero((kinds == 2) | (kinds == 3))
    registers = source.integers(0, REGISTERS, (len(slots), 2)).reshape(-1)
    is_set = np.repeat(kinds[slots] == 2, 2)
    values = source.integers(FIRST_WORD, VOCABULARY, len(registers))
    last = np.full(REGISTERS, -1)
    known = np.ones(len(registers), dtype=bool)
    order = np.arange(len(registers))
    for register in range(REGISTERS):
        positions = np.flatnonzero(registers == register)
        latest = np.maximum.accumulate(np.where(is_set[positions], order[positions], -1))
        reads = ~is_set[positions]
        known[positions[reads]] = latest[reads] >= 0
        answered = reads & (latest >= 0)
        values[positions[answered]] = values[latest[answered]]
        if len(positions) and latest[-1] >= 0:
            last[register] = values[latest[-1]]
    values[~known] = PAD  # a register never set reads as padding
    tokens[slots, 6:] = PAD
    for half in range(2):
        tokens[slots, 3 * half] = np.where(is_set[half::2], SET, GET)
        tokens[slots, 3 * half + 1] = registers[half::2] + FIRST_REGISTER
        tokens[slots, 3 * half + 2] = values[half::2]
        labels[slots, 3 * half + 2] = np.where(is_set[half::2], UNTAUGHT, values[half::2])
    return last


def batch(seed: int, rows: int, length: int) -> tuple[Ints, Ints]:
    source = np.random.default_rng(seed)
    items = [
        context(
            source,
            length,
            near=bool(source.random() < 0.5),
            long=LONGER if source.random() < 0.5 else LONG,
        )
        for _ in range(rows)
    ]
    return np.stack([item.tokens for item in items]), np.stack([item.labels for item in items])


def positions(seed: int, rows: int, length: int, span: int) -> Ints:
    """Return rising positions ``[rows, length]`` below ``span``, which teach every distance."""
    source = np.random.default_rng([seed, 1])
    slots = length // SLOT
    room = (span - length) * source.random((rows, 1)) ** 2
    cuts = np.sort(source.random((rows, slots)), axis=1)
    jumps = np.floor(cuts * room).astype(np.int64)
    return np.repeat(jumps, SLOT, axis=1) + np.arange(length)


def questions(made: Context, seed: int, kinds: dict[str, int]) -> list[Question]:
    """Return questions on a context, spread evenly over the depth; ``kinds`` has the counts."""
    source = np.random.default_rng([seed, 2])
    items = []
    for kind, places, values in (
        ("record", made.records, VALUES),
        ("passage", made.passages, made.long * SLOT - 5),
    ):
        count = min(kinds.get(kind, 0), len(places))
        for part in np.array_split(places, count) if count else []:
            start = int(source.choice(part))
            tokens = made.tokens[start : start + 5 + values].tolist()
            depth = start / len(made.tokens)
            items.append(Question(kind, [ASK, *tokens[1:4]], tokens[4:], depth))
    ready = np.flatnonzero(made.registers >= 0)[: kinds.get("register", 0)]
    for register in ready:
        tokens = [GET, FIRST_REGISTER + int(register)]
        items.append(Question("register", tokens, [int(made.registers[register])], 1.0))
    return items
