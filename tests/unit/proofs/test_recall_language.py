"""The recall model's language: labels are predictable from earlier tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from proofs.recall import language, talks


def made(seed: int, **more: bool) -> language.Context:
    options = {"near": False, **more}
    return language.context(np.random.default_rng(seed), 1024, **options)


@pytest.mark.parametrize("seed", range(5))
def test_every_question_has_an_earlier_answer(seed: int) -> None:
    context = made(seed)
    slots = context.tokens.reshape(-1, language.SLOT)
    questions = [place for place, slot in enumerate(slots) if slot[0] == language.ASK]
    known = {tuple(slot[1:3]): place for place, slot in enumerate(slots) if slot[0] == language.REC}
    assert questions
    assert all(known[tuple(slots[place][1:3])] < place for place in questions)


@pytest.mark.parametrize("seed", range(5))
def test_reading_gives_the_latest_value_of_the_register(seed: int) -> None:
    context = made(seed)
    values: dict[int, int] = {}
    for slot in context.tokens.reshape(-1, language.SLOT):
        for kind, register, value in (slot[:3], slot[3:6]):
            if kind == language.SET and slot[6] == language.PAD:
                values[int(register)] = int(value)
            if kind == language.GET and slot[6] == language.PAD:
                assert value == values.get(int(register), language.PAD)
    last = {language.FIRST_REGISTER + n: int(v) for n, v in enumerate(context.registers) if v >= 0}
    assert values == last


def test_only_predictable_tokens_have_labels() -> None:
    context = made(1)
    taught = context.labels != language.UNTAUGHT
    assert (context.labels[taught] == context.tokens[taught]).all()
    assert 0.05 < taught.mean() < 0.4


def test_near_pairs_share_words_and_are_unique() -> None:
    context = made(3, near=True, asks=False)
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


def test_positions_rise_beyond_the_number_of_tokens() -> None:
    places = language.positions(0, 8, 512, 100_000)
    assert (np.diff(places, axis=1) > 0).all()
    assert places.max() > 20_000
    assert places.max() < 100_000


def test_script_is_reproducible_and_turns_extend_earlier_turns() -> None:
    first, second = talks.script(5), talks.script(5)
    assert [[prompt.prompt for prompt in turn] for turn in first] == [
        [prompt.prompt for prompt in turn] for turn in second
    ]
    turns = [prompt for turn in first[5:9] for prompt in turn if prompt.client == "client2"]
    for before, after in itertools.pairwise(turns):
        spoken = before.prompt + before.answer
        assert after.prompt[: len(spoken)] == spoken
