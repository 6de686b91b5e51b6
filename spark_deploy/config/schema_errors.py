"""Report all mistakes in plain data: where, what is wrong, how to fix it."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import jsonschema

from spark_deploy.config.documents import KeyPath, Schema
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
MAX_VALUES = 200_000
_MAX_LEVELS = 32  # far below the interpreter's recursion limit
# Larger floats are no longer exact, and larger sizes in bytes overflow.
_LIMITS = {float: 2**53, int: 2**63}
_SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be encoded as UTF-8
_URL = re.compile(r'://[^\s"]*')


def schema_problems(
    data: Any, schema: Schema, where: Callable[[KeyPath], str]
) -> Iterator[Problem]:
    """Yield everything in plain ``data`` that violates a JSON ``schema``.

    ``where`` returns the file that sets a key path.
    """

    def full_key(path: KeyPath) -> str:
        return f"{where(path)}: {dotted(path)}" if path else where(path)

    if unusable := list(unusable_values(data)):
        for path, message, fix in unusable:
            yield Problem(full_key(path), message, fix)
        return
    errors = _Validator(schema).iter_errors(data)
    for error in sorted(errors, key=lambda error: dotted(tuple(error.absolute_path))):
        path = tuple(error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.schema, dict):
            for key in sorted(set(error.instance) - set(error.schema.get("properties", {}))):
                unknown = (*path, str(key))
                fix = _suggest_key(unknown, error.schema, schema)
                yield Problem(full_key(unknown), "unknown key", fix)
        else:
            description = str(error.schema.get("description", "")) if error.schema else ""
            fix = f"{_fix(error)}. {description}".replace("?.", "?").removesuffix(". ")
            yield Problem(full_key(path), _message(error), fix)


def _match_pattern(
    validator: Any, pattern: str, instance: Any, schema: Schema
) -> Iterator[jsonschema.ValidationError]:
    """Match ``$`` only at the end of the text, as JSON schema does, not before a final newline."""
    python_pattern = re.sub(r"(?<!\\)\$", r"\\Z", pattern)
    if isinstance(instance, str) and not re.search(python_pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not have the required form")


_Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {"pattern": _match_pattern}
)


def closest(name: str, candidates: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)), None)


def suggest(name: str, candidates: Iterable[str], fallback: str) -> str:
    """Return a fix with the most similar candidate, or ``fallback`` if none is similar."""
    guess = closest(name, candidates)
    return f"did you mean {guess}?" if guess else fallback


def _suggest_key(path: KeyPath, level: Schema, schema: Schema) -> str:
    key = str(path[-1])
    known = sorted(level.get("properties", {}))
    if guess := closest(key, known):
        return f"did you mean {dotted((*path[:-1], guess))}?"
    elsewhere = [name for name in _all_keys(schema) if name.rsplit(".", 1)[-1] == key]
    return f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(known)}"


def _all_keys(schema: Schema, prefix: str = "") -> Iterator[str]:
    for key, value in schema.get("properties", {}).items():
        yield f"{prefix}{key}"
        yield from _all_keys(value, f"{prefix}{key}.")


def _remove_login(url: re.Match[str]) -> str:
    """Replace everything up to the last @, because a password may contain any character."""
    _, at, rest = url[0].rpartition("@")
    return f"://...@{rest}" if at else url[0]


def _message(error: jsonschema.ValidationError) -> str:
    """Describe an error without logins, and with long values shortened."""
    value = json.dumps(error.instance, default=str, ensure_ascii=False)
    value = _URL.sub(_remove_login, value)  # people paste messages into issues
    value = value if len(value) <= 60 else value[:57] + "..."
    expected: Any = error.validator_value
    if error.validator == "type":
        return f"{value} is not {_in_words(expected)}"
    if error.validator == "enum":
        accepted = ", ".join("null" if item is None else str(item) for item in expected)
        return f"{value} is not one of {accepted}"
    if error.validator in ("oneOf", "anyOf"):
        return f"{value} matches none of the accepted forms"
    # jsonschema's message begins with the whole value.
    return error.message.replace(repr(error.instance), value)


def _fix(error: jsonschema.ValidationError) -> str:
    schema = error.schema if isinstance(error.schema, dict) else {}
    expected: Any = error.validator_value
    if error.validator == "type":
        if "string" in expected and isinstance(error.instance, (int, float)):
            return f'write it in quotes: "{error.instance}"'
        return f"write {_in_words(expected)}{_limits(schema)}{_example(schema)}"
    if error.validator == "enum":
        return suggest(str(error.instance), map(str, expected), "use one of these")
    if error.validator == "required":
        present: Any = error.instance
        return f"add {', '.join(name for name in expected if name not in present)}"
    forms = expected if error.validator in ("oneOf", "anyOf") else [schema]
    if texts := [form["patternErrorMessage"] for form in forms if "patternErrorMessage" in form]:
        return " or ".join(texts)
    fixes = {
        "minimum": f"use {expected} or more",
        "exclusiveMinimum": f"use more than {expected}",
        "maximum": f"use {expected} or less",
        "uniqueItems": "list each value once",
        "minLength": "write at least one character, or remove the key",
        "minItems": "list at least one value",
        "maxProperties": "keep a single key",
        "minProperties": "set one key",
        "anyOf": "use one of these forms",
        "oneOf": "use one of these forms",
    }
    return fixes.get(str(error.validator), "write it as described") + _example(schema)


def _in_words(types: str | list[str]) -> str:
    return " or ".join(_TYPES[name] for name in ([types] if isinstance(types, str) else types))


def _limits(schema: Schema) -> str:
    minimum = schema.get("minimum", schema.get("exclusiveMinimum"))
    maximum = schema.get("maximum")
    if minimum is None:
        return ""
    return f" of {minimum} or more" if maximum is None else f" from {minimum} to {maximum}"


def _example(schema: Schema) -> str:
    examples = schema.get("examples") or []
    return f", such as {json.dumps(examples[0], ensure_ascii=False)}" if examples else ""


def dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        separator = "." if text else ""
        text += f"[{part}]" if isinstance(part, int) else f"{separator}{part}"
    return text if text.isprintable() else ascii(text)


def unusable_values(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield (path, message, fix) for values that are not JSON, too large or nested too deeply."""
    if not path and _has_too_many_values(data):
        yield (), f"has more than {MAX_VALUES} values", "write fewer values, without nested aliases"
    elif len(path) > _MAX_LEVELS:
        fix = "remove recursive aliases, and reduce the nesting"
        yield path[:3], "the value is nested too deeply, or contains itself", fix
    elif isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                label = repr(key)[:60]
                yield path, f"{label} is not text", f'write it in quotes: "{label}"'
            else:
                # Check the key's text too.
                yield from unusable_values(key, path or (key,))
                yield from unusable_values(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from unusable_values(value, (*path, index))
    else:
        yield from ((path, message, fix) for message, fix in _scalar_problems(data))


def _scalar_problems(scalar: Any) -> Iterator[tuple[str, str]]:
    if isinstance(scalar, float) and not math.isfinite(scalar):
        yield f"{scalar} is not a finite number", "write a finite number"
    elif isinstance(scalar, (int, float)):
        limit = _LIMITS[float if isinstance(scalar, float) else int]
        if abs(scalar) >= limit:
            yield "is too large a number", f"write a number between -{limit} and {limit}"
    elif isinstance(scalar, str):
        if _SURROGATE.search(scalar):
            yield "contains an invalid character", "type the text again, or remove it"
    elif scalar is not None:
        label = str(scalar)[:60]
        message = f"{label} is a {type(scalar).__name__}, not text or a number"
        yield message, f'write text in quotes: "{label}"'


def _has_too_many_values(data: Any) -> bool:
    """Count values level by level, because nested aliases can expand to billions."""
    level, count = [data], 0
    for _ in range(_MAX_LEVELS + 2):
        inner = (
            list(value.values()) if isinstance(value, dict) else value
            for value in level
            if isinstance(value, (dict, list))
        )
        level = list(islice(chain.from_iterable(inner), MAX_VALUES + 1))
        count += len(level)
        if count > MAX_VALUES:
            return True
    return False
