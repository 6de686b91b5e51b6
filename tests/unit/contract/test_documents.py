import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from spark_contract import documents
from spark_contract.documents import OPTIONAL, DocumentError, json_key


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


def test_documents_round_trip_byte_for_byte():
    assert documents.to_plain(WORK) == DATA
    text = documents.to_json(WORK)
    assert text == json.dumps(DATA, indent=1, sort_keys=True) + "\n"
    assert documents.parse(Work, text) == WORK
    assert documents.to_json(documents.parse(Work, text)) == text


def test_omits_optional_keys_with_defaults():
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
