"""What engines say while they start is read from their logs, and a silent log proves nothing."""

from __future__ import annotations

from proofs.recall import started

LOG = """
(MainProcess pid=1) INFO [interface.py:1108] Setting attention block size to 320 tokens to ensure
(MainProcess pid=1) INFO [flashinfer.py:1106] FlashInfer resolved: decode_backend=xqa, arch=sm90
(MainProcess pid=1) INFO [qwen.py:300] Using FlashInfer GDN prefill kernel (requested=auto).
(MainProcess pid=1) INFO [kv_cache_utils.py:1147] GPU KV cache size: 129,326 tokens, Maximum
"""


def test_a_log_is_read() -> None:
    assert started.facts(LOG) == {
        "block_tokens": 320,
        "decodes_by": "xqa",
        "graphs_become": None,
        "gdn_prefill": "FlashInfer",
        "cache_made": True,
    }


def test_silence_fails_every_claim() -> None:
    silent = started.facts("")
    names = ("talk-cache-full-mtp2", "fi-talk-cache-full-mtp2", "fi-xqa-full-mtp2")
    assert not any(row["passed"] for row in started.judge({name: silent for name in names}))
    assert not any(row["passed"] for row in started.judge({}))


def test_equal_blocks_fail_the_claim_about_blocks() -> None:
    same = {**started.facts(LOG)}
    found = {"talk-cache-full-mtp2": same, "fi-talk-cache-full-mtp2": same}
    assert started.judge(found)[0]["passed"] is False
