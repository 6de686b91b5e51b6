"""What engines said of themselves while they started, from their logs: no answer is judged here.

python3 -m proofs.recall.started WORK OUT.json --environment FILE
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from proofs.recall import run, verdicts
from proofs.recall.judge import Row

BLOCK = re.compile(r"Setting attention block size to (\d+) tokens")
DECODE = re.compile(r"decode_backend=([\w-]+)")
DOWNGRADE = re.compile(r"setting cudagraph_mode=(\w+)")
GDN = re.compile(r"Using (\S+) GDN prefill kernel")
CACHE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")


def facts(log: str) -> dict[str, Any]:
    """Return what a log says of blocks, graphs and kernels; none where it says nothing."""

    def first(pattern: re.Pattern[str]) -> str | None:
        found = pattern.search(log)
        return found[1] if found else None

    block = first(BLOCK)
    return {
        "block_tokens": int(block) if block else None,
        "decodes_by": first(DECODE),
        "graphs_become": first(DOWNGRADE),
        "gdn_prefill": first(GDN),
        "cache_made": first(CACHE) is not None,
    }


def judge(found: dict[str, dict[str, Any]]) -> list[Row]:
    """Return what follows from the logs; an engine that is missing fails its line."""

    def of(name: str, key: str) -> Any:
        return found.get(name, {}).get(key)

    triton, own = "talk-cache-full-mtp2", "fi-talk-cache-full-mtp2"
    native, xqa, small = "fi-attention-full-mtp2", "fi-xqa-full-mtp2", "talk-small-step-full-mtp2"
    blocks = of(triton, "block_tokens"), of(own, "block_tokens")
    return [
        verdicts.row(
            "with prefix caching and FlashInfer's GDN prefill a block is a multiple of 64 tokens, "
            "larger than with Triton's",
            None not in blocks and blocks[1] % 64 == 0 and blocks[0] < blocks[1],
            [triton, own],
            triton=blocks[0],
            flashinfer=blocks[1],
        ),
        verdicts.row(
            "FlashInfer attention with its own decode: full graphs with drafts become PIECEWISE",
            of(native, "graphs_become") == "PIECEWISE",
            [native],
            **found.get(native, {}),
        ),
        verdicts.row(
            "FlashInfer attention that decodes through XQA: nothing lowers the graphs of drafts",
            of(xqa, "decodes_by") == "xqa" and of(xqa, "graphs_become") is None,
            [xqa],
            **found.get(xqa, {}),
        ),
        verdicts.row(
            "a step of 256 tokens below a block of 272 is not refused with prefix caching, drafts",
            of(small, "block_tokens") == 272 and bool(of(small, "cache_made")),
            [small],
            **found.get(small, {}),
        ),
    ]


def main() -> None:
    """Read the logs of one directory and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--environment", type=Path, required=True)
    arguments = parser.parse_args()
    logs = sorted(arguments.work.glob("*.log"))
    found = {path.stem: facts(path.read_text(errors="replace")) for path in logs}
    document = {
        "stage": "recall-started",
        "command": "python3 -m proofs.recall.started WORK OUT --environment FILE",
        **json.loads(arguments.environment.read_text()),
        "caveats": [*run.CAVEATS, "the time ended while these engines warmed up: none was asked"],
        "rows": judge(found),
        "runs": found,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
