import pytest

from proofs.releases import judge

ANSWER = {"kind": "record", "wanted": [5, 6], "tokens": [5, 6], "logprobs": [-0.01, -0.02],
          "margins": [6.0, 5.0]}  # fmt: skip
TWO = [[*("--nnodes", "2", "--node-rank", str(rank))] for rank in (0, 1)]


def served(**changed):
    return {
        "state": "served",
        "healthy_s": 60.0,
        "answers": [dict(ANSWER), dict(ANSWER)],
        "drafts": {"drafted": 100.0, "accepted": 80.0},
        "argv": TWO,
        "ways": {"via NET/": 8, "via P2P": 0, "via SHM": 0},
        "log": ["GPU KV cache size: 2,000 tokens, and more"],
        **changed,
    }


def verdicts(two):
    alone = served(log=["GPU KV cache size: 1,001 tokens, and more"])
    results = {"one-host": alone, "two-hosts-overlay": two, "two-hosts-full": served()}
    rows = [row for row in judge.judge_cluster(results) if row["cases"][0] == "two-hosts-overlay"]
    return {row["claim"].partition(": ")[2]: row["passed"] for row in rows}


def test_two_hosts_with_equal_answers_pass():
    assert len(verdicts(served())) == 5
    assert all(verdicts(served()).values())


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        ({"state": "died"}, "the plan's arguments and environment serve over HTTP"),
        ({"ways": {"via NET/": 8, "via P2P": 2, "via SHM": 0}}, "the planned ranks"),
        ({"ways": {"via NET/": 0, "via P2P": 0, "via SHM": 0}}, "the planned ranks"),
        ({"argv": [TWO[0], TWO[0]]}, "the planned ranks"),
        ({"answers": [{**ANSWER, "tokens": [5, 9]}] * 2}, "every record, passage and register"),
        ({"answers": [{**ANSWER, "tokens": [5, 9]}] * 2}, "token for token as one-host"),
        ({"answers": [{**ANSWER, "logprobs": [-0.01, -0.3]}] * 2}, "token for token as one-host"),
        ({"log": ["GPU KV cache size: 1,001 tokens"]}, "cache for twice the tokens"),
        ({"log": []}, "cache for twice the tokens"),
        ({"drafts": {"drafted": 100.0, "accepted": 60.0}}, "token for token as one-host"),
    ],
)
def test_two_hosts_with_differences_fail(changed, claim):
    failed = [name for name, passed in verdicts(served(**changed)).items() if not passed]
    assert any(name.startswith(claim) for name in failed)
