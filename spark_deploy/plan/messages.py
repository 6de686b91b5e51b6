"""Check the parsers and the chat template, which translate between messages and text."""

from collections.abc import Iterator

from spark_deploy.config.catalog.model import Model
from spark_deploy.config.catalog.types import ENGINE_NAME, Engines
from spark_deploy.config.errors import Problem
from spark_deploy.config.schema_errors import suggest
from spark_deploy.config.settings.types import Settings


def parser_problems(model: Model, settings: Settings, engines: Engines) -> Iterator[Problem]:
    version, engine = engines.for_image(settings.images.get(model.image.role, ""))
    if engine is None:
        return
    parsers = {"tool_call": model.parsers.tool_call, "reasoning": model.parsers.reasoning}
    for kind, parser in parsers.items():
        listed = getattr(engine, kind)
        if parser is not None and parser not in listed:
            fix = suggest(parser, listed, "remove the parser; the text then stays unparsed")
            message = f"{ENGINE_NAME} {version} has no parser {parser}"
            yield Problem(f"model {model.name}: parsers.{kind}", message, fix)


def template_problems(model: Model, settings: Settings) -> Iterator[Problem]:
    if settings.engine.template_fixes and model.fixed_template is None:
        fix = "remove the setting, or set engine.chat_template to a template of your own"
        yield Problem("engine.template_fixes", f"{model.name} has no fixed chat template", fix)
