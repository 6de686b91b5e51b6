"""The recall model's language: labels are predictable from earlier tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from proofs.recall import language, talks


def make_context(seed: int, **options: bool) -> language.Context:
    return language.context(np.random.default_rng(seed), 1024, **{"near": False, **options})


@pytest.mark.parametrize("seed", range(5))
def test_labels_can_be_predicted(seed: int) -> None:
    context = make_context(seed)
    slots = context.tokens.reshape(-1, language.SLOT)
    questions = [place for place, slot in enumerate(slots) if slot[0] == language.ASK]
    records = {tuple(slot[1:3]): n for n, slot in enumerate(slots) if slot[0] == language.REC}
    assert questions
    assert all(records[tuple(slots[place][1:3])] < place for place in questions)
    values: dict[int, int] = {}
    for slot in slots:
        for kind, register, value in (slot[:3], slot[3:6]):
            if kind == language.SET and slot[6] == language.PAD:
                values[int(register)] = int(value)
            if kind == language.GET and slot[6] == language.PAD:
                assert value == values.get(int(register), language.PAD)
    last = {language.FIRST_REGISTER + n: int(v) for n, v in enumerate(context.registers) if v >= 0}
    assert values == last
    taught = context.labels != language.UNTAUGHT
    assert (context.labels[taught] == context.tokens[taught]).all()
    assert 0.05 < taught.mean() < 0.4


def test_near_pairs_share_words_and_are_unique() -> None:
    context = make_context(3, near=True, asks=False)
    starts = np.sort(np.concatenate([context.records, context.passages]))
    pairs = [tuple(context.tokens[start + 1 : start + 3]) for start in starts]
    assert len(set(pairs)) == len(pairs)
    assert len({first for first, _ in pairs}) < len(pairs) / 2


def test_questions_are_spread_over_the_depth() -> None:
    context = language.context(np.random.default_rng(2), 8192, near=False, asks=False)
    questions = language.questions(context, 2, {"record": 16, "passage": 3, "register": 4})
    depths = [question.depth for question in questions if question.kind == "record"]
    assert len(depths) == 16
    assert depths[0] < 0.1
    assert depths[-1] > 0.9
    text = context.tokens.tolist()
    for question in questions:
        if question.kind != "register":
            start = round(question.depth * len(text))
            assert text[start + 4 : start + 4 + len(question.answer)] == question.answer


def test_turns_extend_earlier_turns() -> None:
    turns = [
        prompt for turn in talks.script(5)[5:9] for prompt in turn if prompt.client == "client2"
    ]
    for before, after in itertools.pairwise(turns):
        spoken = before.prompt + before.answer
        assert after.prompt[: len(spoken)] == spoken
