"""What is wrong in files of ssh itself is told as theirs, and by no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_deploy.config.errors import SettingsError
from spark_deploy.inventory.host_keys import Endpoint, look
from spark_deploy.inventory.login import try_key

CONFIGS = {
    "Host *\n  Port abc\n": "holds what cannot be read: invalid literal",
    'Host *\n  ProxyCommand nc %h "\n': "No closing quotation",
    "Host\n": "Unparsable line Host",
    "Host *\n  ProxyJump me@jump\n": "a jump host is reached through itself",
    "\xff\xfe\n": "can't decode byte",
}


def endpoint(config: Path, known_hosts: Path, key_file: Path | None = None) -> Endpoint:
    key = str(key_file) if key_file else None
    return Endpoint("spark-1", "127.0.0.1", "me", 9, str(known_hosts), str(config), key)


@pytest.mark.parametrize("ask", [look, try_key])
@pytest.mark.parametrize(("text", "said"), CONFIGS.items())
def test_a_configuration_that_cannot_be_read(tmp_path: Path, ask, text: str, said: str) -> None:
    (tmp_path / "config").write_text(text, "latin-1")
    with pytest.raises(SettingsError, match=said):
        ask(endpoint(tmp_path / "config", tmp_path / "known_hosts"))


@pytest.mark.parametrize("text", ["a b c\n", "\xff\n"])
def test_a_line_that_is_no_host_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").touch()
    (tmp_path / "known_hosts").write_text(text, "latin-1")
    with pytest.raises(SettingsError, match="known_hosts: holds what cannot be read"):
        look(endpoint(tmp_path / "config", tmp_path / "known_hosts"))


def test_nobody_is_told_to_write_a_key_over_a_file_that_is_there(tmp_path: Path) -> None:
    wrong = tmp_path / "no_key"
    wrong.write_text("mine\n")
    with pytest.raises(SettingsError, match="name the private key") as refused:
        try_key(endpoint(tmp_path / "config", tmp_path / "known_hosts", wrong))
    assert "ssh-keygen -t" not in str(refused.value)
