"""Check plain data against one of our JSON schemas and say each mistake as a sentence."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jsonschema

from spark_deploy.config.documents.plain_data import KeyPath, odd_values
from spark_deploy.config.errors import Problem

_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_URL = re.compile(r'://[^\s"]*')


def dotted(path: Sequence[str | int]) -> str:
    """Write a key path the way people say it, in one line: ``serve.names[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text if text.isprintable() else ascii(text)


def problems_of(
    data: Any,
    schema: dict[str, Any],
    where: Callable[[KeyPath], str],
    renamed: Mapping[str, str] | None = None,
) -> Iterator[Problem]:
    """Yield every mistake of ``data``.

    Args:
        data: what people wrote.
        schema: what it must be.
        where: names the file that set a key path.
        renamed: keys of earlier forms, and how the same is written now: a guess would mislead.
    """
    if odd := list(odd_values(data)):
        yield from (Problem(f"{where(path)}: {dotted(path)}", *said) for path, *said in odd)
        return
    validator = _Validator(schema)
    for error in sorted(validator.iter_errors(data), key=lambda e: dotted(tuple(e.absolute_path))):
        path = tuple(error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.schema, dict):
            for key in sorted(set(error.instance) - set(error.schema.get("properties", {}))):
                fix = (renamed or {}).get(key) or _known_key(
                    (*path, str(key)), error.schema, schema
                )
                place = f"{where((*path, key))}: {dotted((*path, key))}"
                yield Problem(place, "unknown key", fix)
        else:
            place = f"{where(path)}: {dotted(path)}" if path else where(path)
            yield Problem(place, _say(error), _advise(error))


def _matches(
    validator: Any, pattern: str, instance: Any, schema: Mapping[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    """Match as JSON schema means it: ``$`` is the end of the text, no newline comes before it."""
    whole = re.sub(r"(?<!\\)\$", r"\\Z", pattern)
    if isinstance(instance, str) and not re.search(whole, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


_Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {"pattern": _matches}
)


def closest(word: str, known: Sequence[str]) -> str | None:
    """Return the known name that ``word`` is most likely a misspelling of."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None


def _known_key(path: KeyPath, level: dict[str, Any], schema: dict[str, Any]) -> str:
    """Say which key may be meant by one that is not known at this level."""
    key = str(path[-1])
    known = sorted(level.get("properties", {}))
    if guess := closest(key, known):
        return f"did you mean {dotted((*path[:-1], guess))}?"
    elsewhere = [name for name in _all_keys(schema) if name.rsplit(".", 1)[-1] == key]
    return f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(known)}"


def _all_keys(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in schema.get("properties", {}).items():
        yield f"{prefix}{key}"
        yield from _all_keys(value, f"{prefix}{key}.")


def _without_login(url: re.Match[str]) -> str:
    """Return a URL without its login, up to the last @: a password may hold any other character."""
    _, at, rest = url[0].rpartition("@")
    return f"://...@{rest}" if at else url[0]


def _say(error: jsonschema.ValidationError) -> str:
    value = json.dumps(error.instance, default=str, ensure_ascii=False)
    value = _URL.sub(_without_login, value)  # messages are pasted into issues, and kept in logs
    value = value if len(value) <= 60 else value[:57] + "..."
    limit: Any = error.validator_value
    if error.validator == "type":
        names = [limit] if isinstance(limit, str) else list(limit)
        return f"{value} is not {' or '.join(_TYPES[name] for name in names)}"
    if error.validator == "enum":
        known = ("null" if item is None else str(item) for item in limit)
        return f"{value} is not one of {', '.join(known)}"
    if error.validator == "required":
        return error.message.replace("'", "").replace("a required property", "missing but needed")
    if error.validator in ("oneOf", "anyOf"):
        return f"{value} has none of the forms that are known here"
    if error.validator == "uniqueItems":
        return f"{value} names something twice"
    sentences = {
        "minimum": f"{value} is below {limit}",
        "exclusiveMinimum": f"{value} is not above {limit}",
        "maximum": f"{value} is above {limit}",
        "pattern": f"{value} does not have the form that is needed",
        "minLength": "is empty",
        "minItems": "the list is empty",
        "maxProperties": f"{value} has more than one key",
        "minProperties": f"{value} has no key",
    }
    return sentences.get(str(error.validator), error.message)


def _advise(error: jsonschema.ValidationError) -> str:
    """Say what to do first, then what the key means."""
    schema = error.schema if isinstance(error.schema, dict) else {}
    text = _action(error, schema)
    about = str(schema.get("description", ""))
    return f"{text}. {about}" if about else text


def _action(error: jsonschema.ValidationError, schema: dict[str, Any]) -> str:
    limit: Any = error.validator_value
    if error.validator == "type":
        kinds = [limit] if isinstance(limit, str) else list(limit)
        if "string" in kinds and isinstance(error.instance, (int, float)):
            return f'write it in quotes: "{error.instance}"'
        kind = " or ".join(_TYPES[name] for name in kinds)
        return f"write {kind}{_limits(schema)}{_example(schema)}"
    if error.validator == "enum":
        guess = closest(str(error.instance), [str(item) for item in limit])
        return f"did you mean {guess}?" if guess else "use one of those"
    if error.validator == "required":
        there: Any = error.instance
        missing = [name for name in limit if name not in there]
        return f"add {', '.join(missing)}"
    if error.validator == "pattern" and (told := schema.get("patternErrorMessage")):
        return str(told)
    if error.validator in ("oneOf", "anyOf"):
        return " or ".join(_forms(error)) or "use one of these forms"
    actions = {
        "minimum": f"use {limit} or more",
        "exclusiveMinimum": f"use more than {limit}",
        "maximum": f"use {limit} or less",
        "uniqueItems": "name each once",
        "minLength": "write something, or leave the key out",
        "minItems": "name at least one",
        "maxProperties": "keep one key",
        "minProperties": "give one key",
    }
    return actions.get(str(error.validator), "write it in another form") + _example(schema)


def _forms(error: jsonschema.ValidationError) -> Iterator[str]:
    """Yield what to write for each form that a value may have, as far as they say it."""
    choices: Any = error.validator_value
    for one in choices:
        if told := one.get("patternErrorMessage"):
            yield told


def _limits(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return f" of {least} or more" if least is not None else ""


def _example(schema: dict[str, Any]) -> str:
    examples = schema.get("examples") or []
    return f", such as {json.dumps(examples[0], ensure_ascii=False)}" if examples else ""
