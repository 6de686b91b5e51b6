"""A wedged engine is told from one that reads a long prompt."""

from __future__ import annotations

import pytest
from spark_serve import release as releases
from spark_serve.engine import Metrics
from spark_serve.watch import Judge
from stub_host import Host

STALL_S = 120


@pytest.fixture
def judge(host: Host) -> Judge:
    release = host.release(watch={"stall_s": STALL_S, "interval_s": 10})
    return Judge(releases.load(release.name, host.paths).watch, floor_bytes=1)


def seen(*, running: int = 1, prompt: int = 0, generated: int = 0, usage: float = 0.1) -> Metrics:
    return Metrics.parse(
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {generated}\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\n'
    )


def test_a_long_prompt_that_fills_the_cache_chunk_by_chunk_is_no_stall(judge: Judge) -> None:
    for look in range(60):  # ten minutes, and no counter of tokens moves
        said = judge.stalled(seen(usage=0.1 + look / 1000), now_s=look * 10.0)
        assert said is None


def test_an_engine_in_which_nothing_moves_is_stalled_after_the_limit(judge: Judge) -> None:
    verdicts = [judge.stalled(seen(usage=0.4), now_s=look * 10.0) for look in range(13)]
    assert verdicts[:12] == [None] * 12
    assert verdicts[12] == "1 requests are running, but no token was read or written for 120 s"


@pytest.mark.parametrize("moving", ["prompt", "generated"])
def test_each_counter_of_tokens_is_a_sign_of_life(judge: Judge, moving: str) -> None:
    for look in range(60):
        assert judge.stalled(seen(**{moving: look}), now_s=look * 10.0) is None


def test_an_engine_without_work_never_stalls(judge: Judge) -> None:
    for look in range(60):
        assert judge.stalled(seen(running=0), now_s=look * 10.0) is None


def test_an_engine_that_does_not_answer_is_left_to_systemd(judge: Judge) -> None:
    judge.stalled(seen(), now_s=0)
    assert judge.stalled(None, now_s=1000) is None
