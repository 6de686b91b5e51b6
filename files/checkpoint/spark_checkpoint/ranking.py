"""Rank token ids by their frequency in a text; a drafter chooses from the first of them."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from spark_contract.builder_api import TOKEN_IDS, RankPlan
from spark_contract.files import now
from spark_contract.receipts import RankedReceipt

from spark_checkpoint import TOOL_VERSION, ValidationError, storage, verify
from spark_checkpoint.progress import Progress

_CHUNK_CHARACTERS = 1 << 20  # encoding a character takes about 100 bytes
# No token of a byte-level BPE tokenizer extends across these places.
_BREAK = re.compile(r"\n(?=\S)|(?<=\S)(?= )")


def rank(plan: RankPlan, progress: Progress) -> None:
    """Write the ids of the plan's tokens, unless the result already exists."""

    def write(work: Path, result_dir: Path) -> None:
        storage.clear(work)
        text = Path(plan.text).read_text("utf-8", "replace")
        progress.start_phase("rank", len(text))
        ids, token_count = rank_tokens(Path(plan.tokenizer), text, plan.vocabulary, progress)
        result_dir.mkdir()
        path = result_dir / TOKEN_IDS
        sha256 = storage.write_json(path, ids[: plan.tokens])
        receipt = RankedReceipt(
            kind="ranked",
            digest=plan.digest,
            files=(verify.receipt_entry(TOKEN_IDS, storage.read_stamp(path), sha256),),
            tool_version=TOOL_VERSION,
            written_at=now(),
            plan=plan,
            counted_tokens=token_count,
        )
        verify.write_receipt(result_dir, receipt)

    verify.create_checkpoint(plan, f"plan {plan.digest[:12]}", progress, write)


def rank_tokens(
    tokenizer_json: Path, text: str, vocabulary: int, progress: Progress
) -> tuple[list[int], int]:
    """Return all token ids, sorted by frequency, and the number of tokens in the text.

    Added tokens precede all others, because every answer needs some, such as the end of a turn.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the package raises no narrower class
        fix = "use a model with a tokenizer.json"
        raise ValidationError(str(tokenizer_json), f"cannot be read ({error})", fix) from error
    tokenizer.no_truncation()
    counts: Counter[int] = Counter()
    for chunk in split_text(text, _CHUNK_CHARACTERS):
        counts.update(tokenizer.encode(chunk, add_special_tokens=False).ids)
        progress.add(len(chunk))
    added = tokenizer.get_added_tokens_decoder()
    ids = sorted(range(vocabulary), key=lambda token: (token not in added, -counts[token], token))
    return ids, counts.total()


def split_text(text: str, characters: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        match = _BREAK.search(text, start + characters)
        end = match.end() if match else len(text)
        yield text[start:end]
        start = end
