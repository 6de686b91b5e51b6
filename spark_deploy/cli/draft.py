"""A file of ``catalog/models`` that is about to be written: its keys, and why each is there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

_WIDTH = 96


@dataclass(slots=True)
class Draft:
    """Keys of the file, in order, and remarks above each; what is open goes to the reader."""

    repository: str
    revision: str = "main"
    about: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)  # what is not known, or was not used

    @property
    def name(self) -> str:
        """What the file is called."""
        stem = self.repository.rpartition("/")[2].lower()
        return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("._-") or "model"

    def put(self, key: str, value: Any, remark: str = "") -> None:
        """Set a key and say why."""
        self.keys[key] = value
        if remark:
            self.remarks[key] = remark

    def change(self, changed: Mapping[str, Any], remark: str = "") -> None:
        """Have profiles changed for this model."""
        if changed:
            self.put("changes", [{"set": dict(changed)}], remark)

    def text(self) -> str:
        """Return the file."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for line in self.about:
            yield from _comment(line)
        head = {
            "kind": "plain",
            "summary": self.keys.pop("summary", f"{self.repository}, as it was published")[:100],
            "choose_when": self.keys.pop("choose_when", "say here who should take it")[:160],
            "repository": self.repository,
            "revision": self.revision,
        }
        for key, value in {**head, **self.keys}.items():
            if key in self.remarks:
                yield ""
                yield from _comment(self.remarks[key])
            yield from _entry(key, value)


def _entry(key: str, value: Any) -> list[str]:
    text = yaml.safe_dump({key: value}, sort_keys=False, width=_WIDTH, allow_unicode=True)
    return text.rstrip("\n").splitlines()


def _comment(text: str) -> list[str]:
    plain = " ".join("".join(sign if sign.isprintable() else "?" for sign in text).split())
    return textwrap.wrap(plain, _WIDTH, initial_indent="# ", subsequent_indent="# ") or ["#"]
