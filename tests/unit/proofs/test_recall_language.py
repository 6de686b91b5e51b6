"""The recall model's language: what can be known is known from before, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from proofs.recall import language, talks


def made(seed: int, **more: bool) -> language.Context:
    options = {"near": False, **more}
    return language.context(np.random.default_rng(seed), 1024, **options)


@pytest.mark.parametrize("seed", range(5))
def test_every_question_in_a_context_has_its_answer_before_it(seed: int) -> None:
    one = made(seed)
    slots = one.tokens.reshape(-1, language.SLOT)
    asked = [place for place, slot in enumerate(slots) if slot[0] == language.ASK]
    known = {tuple(slot[1:3]): place for place, slot in enumerate(slots) if slot[0] == language.REC}
    assert asked
    assert all(known[tuple(slots[place][1:3])] < place for place in asked)


@pytest.mark.parametrize("seed", range(5))
def test_a_reading_gives_the_last_value_of_its_register(seed: int) -> None:
    one = made(seed)
    held: dict[int, int] = {}
    for slot in one.tokens.reshape(-1, language.SLOT):
        for what, register, value in (slot[:3], slot[3:6]):
            if what == language.SET and slot[6] == language.PAD:
                held[int(register)] = int(value)
            if what == language.GET and slot[6] == language.PAD:
                assert value == held.get(int(register), language.PAD)
    last = {language.FIRST_REGISTER + n: int(v) for n, v in enumerate(one.registers) if v >= 0}
    assert held == last


def test_only_what_can_be_known_is_taught() -> None:
    one = made(1)
    taught = one.labels != language.UNTAUGHT
    assert (one.labels[taught] == one.tokens[taught]).all()
    assert 0.05 < taught.mean() < 0.4


def test_near_pairs_share_words_and_none_is_there_twice() -> None:
    one = made(3, near=True, asks=False)
    starts = np.sort(np.concatenate([one.records, one.passages]))
    pairs = [tuple(one.tokens[start + 1 : start + 3]) for start in starts]
    assert len(set(pairs)) == len(pairs)
    assert len({first for first, _ in pairs}) < len(pairs) / 2


def test_questions_are_spread_over_the_depth_and_answered_in_the_context() -> None:
    one = language.context(np.random.default_rng(2), 8192, near=False, asks=False)
    found = language.questions(one, 2, {"record": 16, "passage": 3, "register": 4})
    depths = [question.depth for question in found if question.kind == "record"]
    assert len(depths) == 16
    assert depths[0] < 0.1
    assert depths[-1] > 0.9
    text = one.tokens.tolist()
    for question in found:
        if question.kind != "register":
            start = round(question.depth * len(text))
            assert text[start + 4 : start + 4 + len(question.answer)] == question.answer


def test_positions_rise_and_reach_far_beyond_the_tokens() -> None:
    places = language.positions(0, 8, 512, 100_000)
    assert (np.diff(places, axis=1) > 0).all()
    assert places.max() > 20_000
    assert places.max() < 100_000


def test_a_script_is_the_same_every_time_and_later_turns_begin_with_earlier_ones() -> None:
    one, two = talks.script(5), talks.script(5)
    assert [[asked.prompt for asked in turn] for turn in one] == [
        [asked.prompt for asked in turn] for turn in two
    ]
    turns = [asked for turn in one[5:9] for asked in turn if asked.client == "client2"]
    for before, after in itertools.pairwise(turns):
        said = before.prompt + before.answer
        assert after.prompt[: len(said)] == said
