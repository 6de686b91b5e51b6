"""The hub's token: on standard input, in a file of root alone, gone when nobody wants it."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.command import StringCommand

from spark_deploy.errors import SettingsError
from spark_deploy.facts.files import FileStates
from spark_deploy.managed import FileState, ManagedFile
from spark_deploy.operations.work.hub_token import hub_token
from spark_deploy.settings.secrets import SecretRef
from tests.unit.operations.test_operations import FakeHost, on

PATH = "/etc/spark/hub-token"
CANARY = "hf_canary0123456789"


class Host(FakeHost):
    """A host with or without a token."""

    def __init__(self, there: FileState | None = None):
        super().__init__({})
        self.there = {PATH: there} if there else {}

    def get_fact(self, fact: Any, **arguments: Any) -> Any:
        assert fact is FileStates
        return {path: self.there[path] for path in arguments["paths"] if path in self.there}


def commands(host: Host, token: SecretRef | None) -> list[StringCommand]:
    with on(host):
        return list(hub_token._inner(token))


def held(mode: int = 0o600, token: str = CANARY) -> FileState:
    return FileState(mode, "root:root", ManagedFile(PATH, f"{token}\n".encode()).sha256)


@pytest.fixture
def reference(tmp_path: Path) -> SecretRef:
    (tmp_path / "token").write_text(f"{CANARY}\n")
    return SecretRef(file=str(tmp_path / "token"))


def test_the_token_travels_on_standard_input_into_a_file_of_root_alone(reference, tmp_path):
    [command] = commands(Host(), reference)
    text = str(command)
    assert CANARY not in text
    assert CANARY not in repr(command)
    sent = base64.b64decode(command.connector_arguments["_stdin"])
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        assert tar.extractfile("0").read() == f"{CANARY}\n".encode()  # type: ignore[union-attr]
    assert f"put 0 600 {PATH}" in text


@pytest.mark.parametrize(
    "there", [held(0o644), held(token="earlier"), FileState(0o600, "ann:ann", held().sha256)]
)
def test_a_token_that_changed_or_others_can_read_is_sent_again(reference, there):
    assert len(commands(Host(there), reference)) == 1


def test_a_token_that_is_there_is_left_alone(reference):
    host = Host(held())
    assert commands(host, reference) == []
    assert host.noops


def test_a_token_that_nobody_wants_any_more_is_removed():
    [command] = commands(Host(held()), None)
    assert str(command) == f"rm -f -- {PATH}"
    host = Host()
    assert commands(host, None) == []
    assert host.noops


@pytest.mark.parametrize("text", ["two words", "tab\there", "schl\u00fcssel", "x" * 513])
def test_what_is_no_token_is_refused_without_being_shown(tmp_path, text):
    (tmp_path / "token").write_text(text)
    with pytest.raises(SettingsError) as caught:
        commands(Host(), SecretRef(file=str(tmp_path / "token")))
    assert "hub.token" in str(caught.value)
    assert text not in str(caught.value)
