"""Convert serving recipes from four projects into catalog files, and list unused keys."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_deploy.cli.models import Draft
from spark_deploy.config.catalog.profile import (
    METHODS_WITH_REPOSITORY,
    Profile,
    Speculation,
    is_repository,
)
from spark_deploy.config.catalog.types import Engine
from spark_deploy.config.documents import convert, schema_of
from spark_deploy.config.errors import CatalogError
from spark_deploy.config.schema_errors import schema_problems
from spark_deploy.config.settings import allowed
from spark_deploy.config.settings import engine as engine_options
from spark_deploy.config.settings.engine import DEVICE_OPTIONS, PROFILE_KEYS

_SPARK = "dgx_spark_gb10"
_SERVICE = "set by the gateway and serve.names"
_IMAGE = "your setting images.engine selects the engine image"
# Reasons why a key is not used.
_REASONS = {
    "build_args": _IMAGE, "container": _IMAGE, "image": _IMAGE, "mods": _IMAGE, "runtime": _IMAGE,
    "docker_image": _IMAGE, "pre_exec": "third-party commands are never run on hosts",
    "post_exec": "third-party commands are never run on hosts",
    "dependencies": "the image contains the dependencies", "host": _SERVICE, "port": _SERVICE,
    "served_model_name": _SERVICE, "setup_command": "the deploy sets up hosts",
}  # fmt: skip
_END_OF_COMMAND = re.compile(r"[|&;]|\d?>")  # a separator or a redirection
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=[^$`]*$")
_MAX_CHARACTERS = 4_000_000
# The keys that we use from each kind of recipe.
_SPARKRUN_KEYS = {"recipe_version", "name", "description", "model", "model_revision", "env",
                  "defaults", "command", "solo_only", "cluster_only", "min_nodes",
                  "max_nodes"}  # fmt: skip
_NVIDIA_KEYS = {"schema_version", "title", "model", "serve", "checkpoint", "topology", "backend",
                "hardware"}  # fmt: skip
_VLLM_KEYS = {"meta", "model", "features", "opt_in_features", "variants", "hardware_overrides"}
_MODEL_KEYS = {"model_id", "base_args", "base_env", "min_vllm_version"}
_VARIANT_KEYS = {"model_id", "extra_args", "extra_env", "hardware_overrides"}


@dataclass(slots=True)
class Recipe:
    kind: str
    repository: str
    args: list[str]  # after `vllm serve MODEL`
    environment: dict[str, Any] = field(default_factory=dict)
    revision: str = "main"
    summary: str = ""
    nodes: int = 1
    unused: list[str] = field(default_factory=list)
    open_questions: list[str] = field(default_factory=list)


def draft_from_recipe(data: Mapping[str, Any], source: str, engine: Engine | None = None) -> Draft:
    """Draft a catalog file from a recipe; leave out parsers that ``engine`` lacks."""
    recipe = _parse(data, source)
    if not is_repository(recipe.repository):
        problem = f"invalid model {recipe.repository[:60]!r}, expected a Hub repository"
        raise CatalogError.single(source, problem, "set the model to ORG/NAME")
    arguments = read_arguments(recipe.args)
    for kind, parser in list(arguments.parsers.items()):
        if engine is not None and parser not in getattr(engine, kind):
            del arguments.parsers[kind]
            text = f"parsers.{kind} {parser}: your engine does not have this parser"
            arguments.unused.append(text)
    if (gpus := max(recipe.nodes, arguments.devices)) > 1:
        problem = f"requires {gpus} GPUs, but imported models run on a single Spark with one GPU"
        raise CatalogError.single(source, problem, "use a recipe for one Spark")
    draft = Draft(recipe.repository, recipe.revision)
    origin = f"Written by `spark-deploy add` from {source}, {recipe.kind}."
    draft.about = [f"{origin} Imported; this project has not run it."]
    draft.put("summary", recipe.summary)
    draft.put("parsers", arguments.parsers, f"From {recipe.kind}.")
    if arguments.parsers:
        draft.put("check", {**dict.fromkeys(arguments.parsers, True), "conversation": True})
    if environment := _take_allowed_environment(recipe):
        arguments.profile["environment"] = environment
    if arguments.profile:
        draft.put("changes", [{"set": arguments.profile}], "From the recipe.")
    draft.put("imported", [f"{recipe.kind}, {source}"])
    unused = [f"not used: {text}" for text in (*recipe.unused, *arguments.unused)]
    draft.open_questions += [*recipe.open_questions, *unused]
    return draft


def _take_allowed_environment(recipe: Recipe) -> dict[str, str]:
    variables = {str(name): str(value) for name, value in recipe.environment.items()}
    reasons: dict[str, str] = {}
    for path in allowed.find_unlisted({}, variables):
        reasons[path.removeprefix("environment.")] = f"{allowed.NOT_LISTED}; {allowed.FIX}"
    for name, reason, _ in engine_options.environment_problems(variables):
        reasons[name] = reason
    recipe.unused += [f"environment {name}: {reasons[name]}" for name in sorted(reasons)]
    return {name: value for name, value in variables.items() if name not in reasons}


def _parse(data: Mapping[str, Any], source: str) -> Recipe:
    if isinstance(data.get("serve"), Mapping) and isinstance(data.get("checkpoint"), Mapping):
        return _parse_nvidia(data)
    if isinstance(data.get("model"), Mapping) and isinstance(data.get("variants"), Mapping):
        return _parse_vllm_project(data)
    if "model" in data and ("command" in data or "defaults" in data):
        return _parse_sparkrun(data, source)
    kinds = "a recipe of sparkrun 2, spark-vllm-docker 1, NVIDIA or vllm-project/recipes"
    raise CatalogError.single(source, "unsupported recipe format", f"use {kinds}")


def _parse_sparkrun(data: Mapping[str, Any], source: str) -> Recipe:
    defaults = _mapping(data.get("defaults"))
    template = data.get("command")
    if isinstance(template, str):
        values = {**defaults, "model": data.get("model")}
        texts = {name: str(value) for name, value in values.items()}
        if len(template) * max(map(len, texts.values())) > _MAX_CHARACTERS:
            raise CatalogError.single(source, "the command is too long", "use another recipe")
        command = re.sub(r"\{(\w+)\}", lambda match: texts.get(match[1], match[0]), template)
        args, exported, unused = _split_serve_command(command)
        unused += [f"defaults.{name}: the command does not use it" for name in defaults
                   if f"{{{name}}}" not in template]  # fmt: skip
    else:
        args, exported, unused = [], {}, []
        for name, value in defaults.items():
            if value is not False and value is not None:
                flag = f"--{str(name).replace('_', '-')}"
                args += [flag] if value is True else [flag, str(value)]
    nodes = _positive_int(data.get("min_nodes"), 1)
    version = str(data.get("recipe_version", ""))
    return Recipe(
        kind=f"a recipe for sparkrun or spark-vllm-docker, version {version[:20] or 'unknown'}",
        repository=str(data.get("model")),
        args=args,
        environment={**_mapping(data.get("env")), **exported},
        revision=str(data.get("model_revision") or "main"),
        summary=str(data.get("description") or data.get("name") or ""),
        nodes=max(nodes, 2) if data.get("cluster_only") is True else nodes,
        unused=[*unused, *_unused_keys(data, _SPARKRUN_KEYS)],
    )


def _parse_nvidia(data: Mapping[str, Any]) -> Recipe:
    serve, checkpoint = _mapping(data.get("serve")), _mapping(data.get("checkpoint"))
    command = str(serve.get("command") or "")
    args, exported, unused = _split_serve_command(command)
    unused += [f"serve.{key}: {_SERVICE}" for key in serve
               if key not in ("command", "label", "target")]  # fmt: skip
    unused += _unused_keys(data, _NVIDIA_KEYS)
    draft = checkpoint.get("draft_label")
    if draft and str(draft) not in command:
        unused.append(f"checkpoint.draft {draft}: the command does not use it")
    backend = data.get("backend") or "vllm"
    return Recipe(
        kind="a recipe.yaml from NVIDIA/local-ai-inference-recipes",
        repository=str(checkpoint.get("target_label") or checkpoint.get("target") or ""),
        args=args,
        environment=exported,
        summary=str(data.get("title") or ""),
        nodes=_positive_int(_mapping(data.get("topology")).get("node_count"), 1),
        unused=unused,
        open_questions=[f"the recipe is written for {backend}, but vLLM serves the model here"]
        * (backend != "vllm"),
    )


def _parse_vllm_project(data: Mapping[str, Any]) -> Recipe:
    model, meta = _mapping(data.get("model")), _mapping(data.get("meta"))
    features, variants = _mapping(data.get("features")), _mapping(data.get("variants"))
    fallback = "default" if "default" in variants else str(next(iter(variants), "default"))
    for_spark = (str(name) for name, variant in variants.items()
                 if _SPARK in _mapping(_mapping(variant).get("hardware_overrides")))  # fmt: skip
    name = next(for_spark, fallback)
    variant = _mapping(variants.get(name))
    hardware = [_mapping(_mapping(part.get("hardware_overrides")).get(_SPARK))
                for part in (data, variant)]  # fmt: skip
    opt_in = set(_string_list(data.get("opt_in_features")))
    args = _string_list(model.get("base_args"))
    unused = []
    for feature, content in features.items():
        if feature in opt_in:
            unused.append(f"features.{feature}: the recipe does not enable this feature by default")
        elif feature in ("tool_calling", "reasoning"):
            args += _string_list(_mapping(content).get("args"))
        else:
            unused.append(f"features.{feature}: only tool calling and reasoning are supported")
    for part in (variant, *hardware):
        args += _string_list(part.get("extra_args"))
    environment = {**_mapping(model.get("base_env")), **_mapping(variant.get("extra_env"))}
    for part in hardware:
        environment |= _mapping(part.get("extra_env"))
    unused += [f"variants.{other}" for other in variants if other != name]
    unused += _unused_keys(data, _VLLM_KEYS)
    unused += [f"model.{text}" for text in _unused_keys(model, _MODEL_KEYS)]
    unused += [f"variants.{name}.{text}" for text in _unused_keys(variant, _VARIANT_KEYS)]
    recipe = Recipe(
        kind=f"a document from vllm-project/recipes, variant {name[:40]}",
        repository=str(variant.get("model_id") or model.get("model_id") or ""),
        args=args,
        environment=environment,
        summary=str(meta.get("title") or ""),
        unused=unused,
    )
    if version := model.get("min_vllm_version"):
        recipe.open_questions.append(f"requires vLLM {str(version)[:20]} or later")
    if _mapping(meta.get("hardware")).get(_SPARK) != "verified":
        recipe.open_questions.append("the recipe is not marked as verified on a DGX Spark")
    return recipe


def _split_serve_command(command: str) -> tuple[list[str], dict[str, Any], list[str]]:
    """Return the arguments after MODEL, the environment variables, and the unused words."""
    text = re.sub(r"^[ \t]*#.*$", "", command.replace("\\\n", " "), flags=re.MULTILINE)
    try:
        parts = shlex.split(text)
    except ValueError:
        parts = []
    if "serve" not in parts:
        return [], {}, ["command: does not call `vllm serve`"] if command.strip() else []
    start = parts.index("serve")
    end = next(
        (n for n, word in enumerate(parts) if n > start and _END_OF_COMMAND.match(word)), len(parts)
    )
    exported = dict(word.split("=", 1) for word in parts[:start] if _ASSIGNMENT.match(word))
    unused = [
        f"command: {word}: only `vllm serve` arguments and environment variables are supported"
        for word in (*parts[:start], *parts[end:])
        if word.split("=", 1)[0] not in exported and word not in ("vllm", "exec", "export")
    ]
    args = parts[start + 1 : end]
    args = args[1:] if args and not args[0].startswith("-") else args  # without the model
    return args, exported, unused


def _unused_keys(data: Mapping[str, Any], used: Iterable[str]) -> list[str]:
    keys = [str(key) for key in data if key not in set(used)]
    return [f"{key}: {_REASONS.get(key, 'no such key in a catalog file')}" for key in keys]


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _string_list(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


def _positive_int(value: Any, default: int) -> int:
    return value if type(value) is int and 0 < value < 1024 else default


_FULL_NAMES = {
    **dict.fromkeys(("-tp", "tensor-parallel"), "tensor-parallel-size"),
    **dict.fromkeys(("-pp", "pipeline-parallel"), "pipeline-parallel-size"),
    "-dp": "data-parallel-size",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-q": "quantization",
}
# Speculation methods in profiles, by their names in vLLM.
_METHODS = {
    **dict.fromkeys(("mtp", "qwen3_next_mtp", "qwen3_5_mtp"), "mtp"),
    **{name: name for name in (*METHODS_WITH_REPOSITORY, "ngram")},
}
_SPECULATION = {
    "num_speculative_tokens": ("tokens", int), "model": ("repository", str),
    "revision": ("revision", str), "prompt_lookup_max": ("longest_match", int),
    "prompt_lookup_min": ("shortest_match", int),
}  # fmt: skip
_PROFILE_KEYS: dict[str, tuple[str, ...]] = {
    **{option: path for option, path in PROFILE_KEYS.items() if option != "kv-cache-memory-bytes"},
    "load-format": ("load_format",),
    "enable-prefix-caching": ("prefix_caching",),
}
_PARSERS = {"reasoning-parser": "reasoning", "tool-call-parser": "tool_call"}
_EXPANSION = re.compile(r"\$[A-Za-z_{(]|`")


@dataclass(slots=True)
class Arguments:
    profile: dict[str, Any] = field(default_factory=dict)
    parsers: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    devices: int = 1


def read_arguments(args: list[str]) -> Arguments:
    arguments = Arguments()
    options: dict[str, Any] = {}
    for name, values in _option_values(args):
        if any(_EXPANSION.search(value) for value in values):
            text = " ".join(values)[:60]
            arguments.unused.append(f"--{name} {text}: the value needs shell expansion")
            continue
        option, _, key = name.partition(".")
        value = _parse_value(values)
        options[option] = {**_mapping(options.get(option)), key: value} if key else value
    for name, value in options.items():
        _add_argument(name, value, arguments)
    # Of the options without a profile key, keep those that a catalog file may set.
    others = arguments.profile.pop("options", {})
    for option, problem, fix in list(engine_options.option_problems(others)):
        del others[option]
        arguments.unused.append(f"--{option}: {problem}; {fix}")
    for option, value in list(others.items()):
        for path in allowed.find_unlisted(engine_options.canonical_options({option: value}), {}):
            others.pop(option, None)
            text = f"--{path.removeprefix('options.')}: {allowed.NOT_LISTED}; {allowed.FIX}"
            arguments.unused.append(text)
    if others:
        arguments.profile["options"] = others
    return arguments


def _add_argument(name: str, value: Any, arguments: Arguments) -> None:
    if name in DEVICE_OPTIONS:
        if type(value) is int and value > 1:
            arguments.devices *= value
    elif name in _PARSERS and isinstance(value, str):
        arguments.parsers[_PARSERS[name]] = value
    elif name in _PROFILE_KEYS:
        _add_profile_key(name, value, arguments)
    elif name == "speculative-config":
        _add_speculation(_mapping(value), arguments)
    elif name == "trust-remote-code":
        arguments.unused.append(f"--{name}: third-party code is never run")
    elif name != "enable-auto-tool-choice":  # the plan sets it for models with a parser
        arguments.profile.setdefault("options", {})[name] = value


def _add_profile_key(name: str, value: Any, arguments: Arguments) -> None:
    *parents, last = _PROFILE_KEYS[name]
    schema = schema_of(Profile, "profile")
    for key in (*parents, last):
        schema = schema["properties"][key]
    if list(schema_problems(value, schema, lambda path: "")):
        arguments.unused.append(f"--{name} {str(value)[:60]}: not a valid value in a profile")
        return
    section = arguments.profile
    for key in parents:
        section = section.setdefault(key, {})
    section[last] = value


def _add_speculation(config: dict[str, Any], arguments: Arguments) -> None:
    method = str(config.get("method"))
    if method not in _METHODS:
        arguments.unused.append(f"--speculative-config: method {method[:40]} is not supported")
        return
    speculation = {"method": _METHODS[method]}
    for name, (key, value_type) in _SPECULATION.items():
        if name in config and type(config[name]) is value_type:
            speculation[key] = config[name]
    schema = schema_of(Speculation, "speculation")
    problems = [problem.what for problem in schema_problems(speculation, schema, lambda path: "")]
    if not problems:  # only data that matches the schema can be converted
        problems = [problem.what for problem in convert(Speculation, speculation).violations()]
    if problems:
        arguments.unused.append(f"--speculative-config: {problems[0]}")
        return
    arguments.profile["speculation"] = speculation
    unused = [key for key in config if key != "method" and key not in _SPECULATION]
    arguments.unused += [f"--speculative-config {key}: set by the engine" for key in unused]


def _option_values(args: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option's full name and values."""
    name: str | None = None
    values: list[str] = []
    for arg in args:
        is_option = arg.startswith("--") or (arg.startswith("-") and arg in _FULL_NAMES)
        if not is_option:
            values.append(arg)
            continue
        if name is not None:
            yield name, values
        option, equals, value = arg.partition("=")
        option = option.removeprefix("--").replace("_", "-")
        name, values = _FULL_NAMES.get(option, option), [value] if equals else []
    if name is not None:
        yield name, values


def _parse_value(values: list[str]) -> Any:
    """Return True for no value, a list for several, and for one, its JSON value or the string."""
    if len(values) != 1:
        return values or True
    text = values[0]
    if not text.startswith(("{", "[")) and not text.replace(".", "", 1).isdecimal():
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
