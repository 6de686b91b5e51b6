import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from spark_contract import documents, files, receipts
from spark_contract.documents import OPTIONAL, DocumentError, json_key

from tests.receipts import checkpoint_receipt, source_receipt


@dataclass(frozen=True, slots=True)
class Receipt:
    receipt: str
    digest: str


@dataclass(frozen=True, slots=True)
class Absent:
    absent: str


@dataclass(frozen=True, slots=True)
class Work:
    SCHEMA_VERSION: ClassVar[int] = 2

    came: str = field(metadata=json_key("from"))
    state: Literal["asked", "done"]
    argv: tuple[str, ...]
    size: tuple[int, int]
    limit_s: float
    env: dict[str, str]
    names: tuple[str, ...]
    proof: Receipt | Absent
    more: Any
    user: str | None
    unless: Receipt | None = field(default=None, metadata=OPTIONAL)
    tries: int = 8


WORK = Work(came="a", state="done", argv=("x", "y"), size=(1, 2), limit_s=600, env={"k": "v"},
            names=("a", "b"), proof=Absent("/tree"), more={"any": [1]}, user=None)  # fmt: skip
DATA = {
    "schema_version": 2, "from": "a", "state": "done", "argv": ["x", "y"], "size": [1, 2],
    "limit_s": 600, "env": {"k": "v"}, "names": ["a", "b"], "proof": {"absent": "/tree"},
    "more": {"any": [1]}, "user": None, "tries": 8,
}  # fmt: skip


def test_documents_are_unchanged_after_being_read_and_rewritten():
    assert documents.to_plain(WORK) == DATA
    text = documents.to_json(WORK)
    assert text == json.dumps(DATA, indent=1, sort_keys=True) + "\n"
    assert documents.parse(Work, text) == WORK
    assert documents.to_json(documents.parse(Work, text)) == text


def test_documents_omit_optional_keys_with_default_values():
    result = {**DATA, "unless": {"receipt": "/r", "digest": "d"}}
    work = documents.read(Work, result)
    assert work.unless == Receipt("/r", "d")
    assert documents.to_plain(work) == result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 3}, "schema_version: invalid value 3, expected 2"),
        ({"schema_version": None}, "schema_version: invalid value None, expected 2"),
        ({"schema_version": 2.0}, "schema_version: invalid value 2.0, expected 2"),
        ({"colour": 1}, "colour: unknown"),
        ({"from": 1}, "from: expected str, got 1"),
        ({"argv": "x y"}, "argv: expected a list, got 'x y'"),
        ({"argv": ["x", 1]}, "argv[1]: expected str, got 1"),
        ({"size": [1]}, "size: expected 2 values, got 1"),
        ({"size": [1, True]}, "size[1]: expected int, got True"),
        ({"size": [1, 2.0]}, "size[1]: expected int, got 2.0"),
        ({"limit_s": "600"}, "limit_s: expected float, got '600'"),
        ({"env": {"k": None}}, "env.k: expected str, got None"),
        ({"state": "begun"}, "state: invalid value 'begun', expected asked or done"),
        ({"user": 7}, "user: expected str, got 7"),
        ({"unless": {"receipt": "/r"}}, "unless.digest: missing"),
        ({"proof": {"absent": "/t", "digest": ""}},
         "proof.absent: unknown or proof.digest: unknown"),
    ],
)  # fmt: skip
def test_error_for_invalid_value_names_the_path(change, message):
    with pytest.raises(DocumentError) as refused:
        documents.read(Work, {**DATA, **change})
    assert str(refused.value) == message


def test_rejects_true_as_a_number():
    @dataclass(frozen=True, slots=True)
    class First:
        SCHEMA_VERSION: ClassVar[int] = 1
        level: Literal[1, 2]

    assert documents.read(First, {"schema_version": 1, "level": 1}) == First(1)
    for wrong in ({"schema_version": True, "level": 1}, {"schema_version": 1, "level": True}):
        with pytest.raises(DocumentError, match="invalid value True, expected 1"):
            documents.read(First, wrong)


@pytest.mark.parametrize("missing", sorted(DATA))
def test_rejects_missing_key(missing):
    rest = {name: value for name, value in DATA.items() if name != missing}
    with pytest.raises(DocumentError, match=f"^{missing}: "):
        documents.read(Work, rest)


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": 2', "null"])
def test_rejects_text_that_is_not_a_document(text):
    with pytest.raises(DocumentError):
        documents.parse(Work, text)


FILE = {"path": "a/b", "size_bytes": 3, "sha256": "0" * 64, "modified_ns": 1}
LINK = {**FILE, "path": "c", "link_of": "/base/c"}
SHARD = {"path": "d", "size_bytes": 3, "pieces": [f"3:{'1' * 64}"], "modified_ns": 1}


def test_source_receipt_is_read_back_unchanged():
    data = json.loads(source_receipt("d" * 64, [FILE, LINK, SHARD]))
    receipt = receipts.parse(json.dumps(data))
    assert isinstance(receipt, receipts.SourceReceipt)
    assert documents.to_plain(receipt) == data


def test_checkpoint_receipt_names_its_base():
    receipt = receipts.parse(checkpoint_receipt("/srv/base"))
    assert isinstance(receipt, receipts.CheckpointReceipt)
    assert receipt.plan.base_dir == Path("/srv/base")


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "", "."])
def test_rejects_receipt_with_path_outside_tree(tmp_path, path):
    (tmp_path / "receipt.json").write_text(source_receipt(files=[{**FILE, "path": path}]))
    assert receipts.find_receipt(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"kind": "invoice"}', "\xff"])
def test_rejects_invalid_receipt(tmp_path, text):
    assert receipts.find_receipt(tmp_path) is None
    (tmp_path / "receipt.json").write_bytes(text.encode("latin-1"))
    assert receipts.find_receipt(tmp_path) is None
    with pytest.raises(DocumentError):
        receipts.parse(text)


def test_checkpoint_is_complete_if_its_file_sizes_match(tmp_path):
    receipt = receipts.parse(source_receipt(files=[{**FILE, "path": "a"}, SHARD]))
    (tmp_path / "a").write_text("abc")
    assert not receipt.is_complete(tmp_path)
    (tmp_path / "d").write_text("ab")
    assert not receipt.is_complete(tmp_path)
    (tmp_path / "d").write_text("abc")
    assert receipt.is_complete(tmp_path)


def test_write_error_names_the_target_file():
    with pytest.raises(OSError, match=r"settings\.yml") as refused:
        files.write_text(Path("/proc/settings.yml"), "")
    assert refused.value.filename == "/proc/settings.yml"


def ended_process():
    done = subprocess.Popen(["true"])
    done.wait()
    return done.pid


def test_removes_temporary_file_of_killed_writer(tmp_path):
    left = tmp_path / f".record.json.{ended_process()}"
    left.write_text("half")
    files.write_text(tmp_path / "record.json", "whole\n")
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_keeps_temporary_files_of_other_writers(tmp_path):
    names = [
        f".record.json.{os.getppid()}", f".other.json.{ended_process()}", ".record.json.note",
        f"record.json.{ended_process()}",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).write_text("theirs")
    files.write_text(tmp_path / "record.json", "whole\n")
    assert {path.name for path in tmp_path.iterdir()} == {"record.json", *names}
