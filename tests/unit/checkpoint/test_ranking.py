import hashlib
import json
import random
from collections import Counter

import pytest
from builder_faults import run_broken, spread_calls
from builder_trees import run_tool
from spark_checkpoint import ranking
from spark_checkpoint.progress import Progress
from tokenizers import Tokenizer

from lab.model import vocabulary

WORDS = 512
PIECES = (
    "spark",
    " two",
    " two",
    "\n",
    "\n\n",
    "  ",
    "{x}",
    "7",
    ". ",
    "ü",
    "<tool_call>",
    "\t",
    "}\n",
)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    vocabulary.train(WORDS).save(str(path))
    return path


@pytest.fixture(scope="module")
def text():
    return "".join(random.Random(3).choices(PIECES, k=4000))


@pytest.fixture
def order(tokenizer_json, text, tmp_path):
    (tmp_path / "text.txt").write_text(text)

    def write(**changes):
        path = tmp_path / "rank.json"
        plan = {
            "schema_version": 1, "digest": "1" * 64, "name": "tiny",
            "tokenizer": str(tokenizer_json), "text": str(tmp_path / "text.txt"),
            "vocabulary": WORDS + 8, "tokens": 64, "out": str(tmp_path / "models/ranked"),
            **changes,
        }  # fmt: skip
        path.write_text(json.dumps(plan))
        return path

    return write


def expected_ids(tokenizer_json, text, rows):
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    counts = Counter(tokenizer.encode(text, add_special_tokens=False).ids)
    added = {token["id"] for token in json.loads(tokenizer_json.read_text())["added_tokens"]}
    ids = sorted(added, key=lambda token: (-counts[token], token))
    return [*ids, *sorted(set(range(rows)) - added, key=lambda token: (-counts[token], token))]


@pytest.mark.parametrize("characters", [1, 50, 1 << 20])
def test_ranks_added_tokens_first_then_by_count_then_by_id(
    tokenizer_json, text, characters, monkeypatch
):
    monkeypatch.setattr(ranking, "_CHUNK_CHARACTERS", characters)
    with Progress(quiet=True) as progress:
        ids, counted = ranking.rank_tokens(tokenizer_json, text, WORDS + 8, progress)
    assert ids == expected_ids(tokenizer_json, text, WORDS + 8)
    assert sorted(ids) == [*range(WORDS + 8)]
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    assert counted == len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_job_writes_ids_and_receipt_once(order, tokenizer_json, text, tmp_path):
    out = tmp_path / "models/ranked"
    run_tool("rank", order())
    ids = json.loads((out / "token_ids.json").read_text())
    assert ids == expected_ids(tokenizer_json, text, WORDS + 8)[:64]
    receipt = json.loads((out / "receipt.json").read_text())
    sha256 = hashlib.sha256((out / "token_ids.json").read_bytes()).hexdigest()
    assert [file["sha256"] for file in receipt["files"]] == [sha256]
    assert (receipt["kind"], receipt["digest"]) == ("ranked", "1" * 64)
    before = [(path, path.stat()) for path in sorted(out.iterdir())]
    run_tool("rank", order())
    assert [(path, path.stat()) for path in sorted(out.iterdir())] == before
    run_tool("verify", out, "--full")
    (out / "token_ids.json").write_text(json.dumps([*reversed(ids)], indent=2) + "\n")
    assert run_tool("verify", out, check=False).returncode == 5
    assert run_tool("rank", order(digest="2" * 64), check=False).returncode == 3


@pytest.mark.parametrize(
    ("name", "content", "code"), [("tokenizer", None, 3), ("tokenizer", "{}", 3), ("text", None, 4)]
)
def test_unreadable_inputs_leave_no_result(order, tmp_path, name, content, code):
    path = tmp_path / "damaged"
    if content is not None:
        path.write_text(content)
    done = run_tool("rank", order(**{name: str(path)}), check=False)
    assert (done.returncode, str(path) in done.stderr) == (code, True)
    assert not (tmp_path / "models/ranked").exists()


@pytest.mark.slow
def test_killed_job_is_finished_by_the_next_run(order, tmp_path):
    out = tmp_path / "models/ranked"
    calls = run_broken("rank", order()).calls
    expected = (out / "token_ids.json").read_bytes()
    killed = 0
    for number in spread_calls(calls):
        for path in (*out.iterdir(), out):
            path.unlink() if path.is_file() else path.rmdir()
        killed += run_broken("rank", order(), number=number).returncode == -9
        if out.exists():
            run_tool("verify", out, "--full")
        run_tool("rank", order())
        assert (out / "token_ids.json").read_bytes() == expected
        assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert killed > 5
