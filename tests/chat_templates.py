"""Render chat templates like transformers does (utils/chat_template_utils.py)."""

import functools
import json
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spark_deploy.config.checkout import CHECKOUT

QWEN = (CHECKOUT / "catalog/templates/qwen3.5.jinja").read_text(encoding="utf-8")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return _compiled(template).render(messages=messages, **variables)
