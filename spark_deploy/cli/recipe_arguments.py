"""Arguments of ``vllm serve`` in the words of the catalog."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spark_deploy.config.catalog.companions import OF_A_REPOSITORY, Speculation
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.documents.declare import convert, schema_of
from spark_deploy.config.documents.schema_check import problems_of
from spark_deploy.config.settings.engine.arguments import DECIDING
from spark_deploy.config.settings.engine.options import DEVICE_OPTIONS, option_problems

_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-q": "quantization",
}
# The engine's words for what a profile calls by one name.
_METHODS = {
    **dict.fromkeys(("mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"),
    **{name: name for name in (*OF_A_REPOSITORY, "ngram")},
}
_DRAFTING = {
    "num_speculative_tokens": ("tokens", int), "model": ("repository", str),
    "revision": ("revision", str), "prompt_lookup_max": ("longest_match", int),
    "prompt_lookup_min": ("shortest_match", int),
}  # fmt: skip
_OLD = {"tensor-parallel": "tensor-parallel-size", "pipeline-parallel": "pipeline-parallel-size"}
# Options that become a key of their own, and where it stands.
_KEYS: dict[str, tuple[str, ...]] = {
    **{option: path for option, path in DECIDING.items() if option != "kv-cache-memory-bytes"},
    "load-format": ("load_format",),
    "enable-prefix-caching": ("prefix_caching",),
}
_PARSERS = {"reasoning-parser": "reasoning", "tool-call-parser": "tool_call"}
_SAID = ("enable-auto-tool-choice",)  # follows from the parser
_OF_A_SHELL = re.compile(r"\$[A-Za-z_{(]|`")
_NO_CODE = ("trust-remote-code", "reasoning-parser-plugin", "tool-parser-plugin")


@dataclass(slots=True)
class Arguments:
    """What was taken, and what was not."""

    profile: dict[str, Any] = field(default_factory=dict)
    parsers: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    devices: int = 1


def arguments_of(words: list[str]) -> Arguments:
    """Return arguments as keys of a profile and names of parsers."""
    taken = Arguments()
    options: dict[str, Any] = {}
    for name, value in _pairs(words):
        if any(_OF_A_SHELL.search(one) for one in value):
            taken.unused.append(f"--{name} {' '.join(value)[:60]}: only a shell knows what it is")
            continue
        plain, _, inner = name.partition(".")
        if inner:
            known = options.get(plain)
            options[plain] = {**(known if isinstance(known, dict) else {}), inner: _read(value)}
        else:
            options[plain] = _read(value)
    for name, value in options.items():
        _take(name, value, taken)
    own = taken.profile.get("options", {})
    for option, what, fix in list(option_problems(own)):
        del own[option]
        taken.unused.append(f"--{option}: {what}; {fix}")
    if not own:
        taken.profile.pop("options", None)
    return taken


def _take(name: str, value: Any, taken: Arguments) -> None:
    """Put one option where it belongs."""
    if name in DEVICE_OPTIONS:
        if type(value) is int and value > 1:
            taken.devices *= value
    elif name in _PARSERS and isinstance(value, str):
        taken.parsers[_PARSERS[name]] = value
    elif name in _KEYS:
        _set(name, value, taken)
    elif name == "speculative-config":
        _speculate(value, taken)
    elif name in _NO_CODE:
        taken.unused.append(f"--{name}: code of others is not run")
    elif name not in _SAID:
        taken.profile.setdefault("options", {})[name] = value


def _set(name: str, value: Any, taken: Arguments) -> None:
    path, said = _KEYS[name], schema_of(Profile, "profile")
    for key in path:
        said = said["properties"][key]
    if list(problems_of(value, said, lambda path: "")):
        taken.unused.append(f"--{name} {str(value)[:60]}: is nothing that a profile can say")
        return
    place = taken.profile
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value


def _speculate(value: Any, taken: Arguments) -> None:
    """Take drafts whose weights, if they have any of their own, are in a repository."""
    drafts = value if isinstance(value, dict) else {}
    method = _METHODS.get(str(drafts.get("method")))
    if method is None:
        said = str(drafts.get("method"))[:40]
        taken.unused.append(f"--speculative-config: method {said} is not known here")
        return
    told = {
        ours: drafts[name]
        for name, (ours, kind) in _DRAFTING.items()
        if name in drafts and type(drafts[name]) is kind
    }
    found = {"method": method, **told}
    wrong = [one.what for one in problems_of(found, schema_of(Speculation, "s"), lambda path: "")]
    wrong = wrong or [one.what for one in convert(Speculation, found).broken()]
    if wrong:
        taken.unused.append(f"--speculative-config: {wrong[0]}")
        return
    taken.profile["speculation"] = found
    more = [key for key in drafts if key != "method" and key not in _DRAFTING]
    taken.unused += [f"--speculative-config {key}: the engine chooses it" for key in more]


def _pairs(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield options with their values, in the engine's spelling."""
    name: str | None = None
    values: list[str] = []
    for word in words:
        option = word.startswith("--") or word in _SHORT
        if option:
            if name is not None:
                yield name, values
            head, equals, value = word.partition("=")
            bare = _SHORT.get(head, head.removeprefix("--").replace("_", "-"))
            name, values = _OLD.get(bare, bare), [value] if equals else []
        else:
            values.append(word)
    if name is not None:
        yield name, values


def _read(values: list[str]) -> Any:
    """Return a value as YAML would hold it: a flag is true, JSON a mapping, digits a number."""
    if not values:
        return True
    if len(values) > 1:
        return values
    [text] = values
    if text.startswith(("{", "[")) or text.replace(".", "", 1).isdecimal():
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text
