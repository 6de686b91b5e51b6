"""Take out of a text what tells one host, one network or one owner from another.

The report's fields are chosen so that nothing of the kind should come this far; this is the second
lock, for words that a program or a vendor put where nobody expects them.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

_GONE = "<redacted>"
_KEY = re.compile(
    r"(?i)\b(?:bearer|basic)\s+\S+|\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abpr]-|AKIA)"
    r"[\w-]{8,}|\beyJ[\w-]+\.[\w-]+\.[\w-]*"
)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_MAC = re.compile(r"(?<![\w:-])[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}(?![\w:-])")
_ADDRESS = re.compile(r"(?<![\w.:])(?:[0-9A-Fa-f]*:[0-9A-Fa-f:.]+|\d+(?:\.\d+){3})(?![\w:])")
_HOME = re.compile(r"(?<=/home/)[^/\s'\"]+")
_SERIAL = re.compile(r"(?i)\b(?:serial|s/n|uuid)\b\W*(?:number|no)?\W*[\w-]+")
_UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b")
# A secret says nothing of itself; digests say what they are, names of classes are made of words.
_LONG = re.compile(r"(?<!sha256:)(?<![\w/+-])[\w/+-]{20,}={0,2}(?![\w/+-])")
_WORDS = re.compile(r"[a-z]{4,}")


def redacted(text: str) -> str:
    """Return a text without keys, tokens, serial numbers, addresses and names of people."""
    for pattern in (_KEY, _UUID, _SERIAL, _MAIL, _MAC):
        text = pattern.sub(_GONE, text)
    text = _LOGIN.sub(f"{_GONE}@", text)
    text = _HOME.sub(_GONE, text)
    text = _ADDRESS.sub(_without_address, text)
    return _LONG.sub(_without_secret, text)


def _without_address(found: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(found[0].rstrip(".:") if "::" not in found[0] else found[0])
    except ValueError:  # a time of day, a version
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else _GONE


def _without_secret(found: re.Match[str]) -> str:
    word = found[0]
    digits, capitals = sum(map(str.isdigit, word)), sum(map(str.isupper, word))
    in_words = digits <= 4 and capitals <= 0.4 * len(word) and len(_WORDS.findall(word)) > 1
    return word if in_words or (word.isupper() and not digits) else _GONE


def all_redacted(value: Any) -> Any:
    """Return plain data with every text in it redacted, keys of mappings as well."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted(str(key)): all_redacted(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [all_redacted(one) for one in value]
    return value
