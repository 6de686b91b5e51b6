"""Recipes of others as files of the catalog: every key is used, or named as not used.

sparkrun's second form, the first of spark-vllm-docker, NVIDIA's ``recipe.yaml`` and documents of
vllm-project/recipes: each comes down to a repository, arguments of ``vllm serve``, environment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_deploy.cli.draft import Draft
from spark_deploy.cli.recipe_arguments import Arguments, arguments_of
from spark_deploy.config.catalog.companions import is_repository
from spark_deploy.config.catalog.types import Engine
from spark_deploy.config.errors import CatalogError
from spark_deploy.config.settings.engine.options import environment_problems

_SPARK = "dgx_spark_gb10"
_OURS = "the gateway and serve.names decide it"
_IMAGE = "the engine's image is images.engine of your settings, unchanged"
# Why keys have no part in a catalog file.
_WHY_NOT = {
    "build_args": _IMAGE, "container": _IMAGE, "image": _IMAGE, "mods": _IMAGE, "runtime": _IMAGE,
    "docker_image": _IMAGE, "pre_exec": "commands of others are not run on hosts",
    "post_exec": "commands of others are not run on hosts",
    "dependencies": "the image brings what the engine needs", "host": _OURS, "port": _OURS,
    "served_model_name": _OURS, "setup_command": "a deploy sets hosts up",
}  # fmt: skip


# What ends a command, or says where its output goes.
_SHELL = re.compile(r"[|&;]|\d?>")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=[^$`]*$")
_MOST_CHARACTERS = 4_000_000
_OF_MODEL = {"model_id", "base_args", "base_env", "min_vllm_version"}
_OF_VARIANT = {"model_id", "extra_args", "extra_env", "hardware_overrides"}


@dataclass(slots=True)
class Recipe:
    """What all kinds come down to."""

    kind: str
    repository: str
    words: list[str]  # after `vllm serve MODEL`
    environment: dict[str, Any] = field(default_factory=dict)
    revision: str = "main"
    summary: str = ""
    nodes: int = 1
    unused: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)


def draft_of_recipe(data: Mapping[str, Any], source: str, engine: Engine | None = None) -> Draft:
    """Return the catalog file of a recipe; of parsers those that the engine has, if it is known.

    Raises:
        CatalogError: It is of no known kind, names no repository, or is for several hosts.
    """
    recipe = _read(data, source)
    if not is_repository(recipe.repository):
        what = f"names no repository of the hub ({recipe.repository[:60]!r})"
        raise CatalogError.one(source, what, "write ORG/NAME as its model")
    taken = arguments_of(recipe.words)
    for kind, parser in list(taken.parsers.items()):
        if engine is not None and parser not in getattr(engine, kind):
            del taken.parsers[kind]
            taken.unused.append(f"parsers.{kind} {parser}: your engine has none of that name")
    nodes = max(recipe.nodes, taken.devices)
    if nodes > 1:
        what = (
            f"is for {nodes} GPUs, of which a Spark has one: {nodes} hosts together; a repository "
            "served as published is by one host"
        )
        raise CatalogError.one(source, what, "take a recipe for one Spark; clusters serve hybrids")
    draft = Draft(recipe.repository, recipe.revision)
    draft.about = [
        f"Written by `spark-deploy add` from {source}, {recipe.kind}. "
        "imported; not run by this project"
    ]
    if recipe.summary:
        draft.put("summary", recipe.summary)
    _put(draft, taken, _environment(recipe), recipe.kind)
    draft.put("imported", [f"{recipe.kind}, {source}"])
    draft.open += [*recipe.open, *(f"not used: {one}" for one in (*recipe.unused, *taken.unused))]
    return draft


def _put(draft: Draft, taken: Arguments, environment: dict[str, str], kind: str) -> None:
    if taken.parsers:
        draft.put("parsers", taken.parsers, f"From {kind}.")
        draft.put("check", {**dict.fromkeys(taken.parsers, True), "conversation": True})
    changed = {**taken.profile, **({"environment": environment} if environment else {})}
    draft.change(changed, "What the recipe tells the engine beside what this project decides.")


def _environment(recipe: Recipe) -> dict[str, str]:
    """Return the variables that may be given; the others are named."""
    given = {str(name): str(value) for name, value in recipe.environment.items()}
    refused = {name: what for name, what, _ in environment_problems(given)}
    odd = {name for name in given if not re.fullmatch("[A-Z_][A-Z0-9_]*", name)}
    recipe.unused += [f"environment {name}: {refused.get(name, 'is no name of a variable')}"
                      for name in sorted({*refused, *odd})]  # fmt: skip
    return {name: value for name, value in given.items() if name not in refused.keys() | odd}


def _read(data: Mapping[str, Any], source: str) -> Recipe:
    if isinstance(data.get("serve"), Mapping) and isinstance(data.get("checkpoint"), Mapping):
        return _nvidia(data)
    if isinstance(data.get("model"), Mapping) and isinstance(data.get("variants"), Mapping):
        return _vllm_project(data)
    if "model" in data and ("command" in data or "defaults" in data):
        return _sparkrun(data, source)
    what = "is no recipe of a kind known here"
    fix = "sparkrun 2, spark-vllm-docker 1, NVIDIA's recipe.yaml and vllm-project/recipes are"
    raise CatalogError.one(source, what, fix)


def _sparkrun(data: Mapping[str, Any], source: str) -> Recipe:
    """Both forms: a command with places for the defaults, or the defaults alone."""
    defaults = _mapping(data.get("defaults"))
    text = data.get("command")
    used = {"recipe_version", "name", "description", "model", "model_revision", "defaults", "env",
            "command", "solo_only", "cluster_only", "min_nodes", "max_nodes"}  # fmt: skip
    values = {**defaults, "model": data.get("model")}
    if isinstance(text, str):
        words, exported, unused = _served(_filled(text, values, source))
        unused += [f"defaults.{name}: the command does not say it" for name in defaults
                   if f"{{{name}}}" not in text]  # fmt: skip
    else:
        words, exported, unused = list(_of_defaults(defaults)), {}, []
    nodes = _count(data.get("min_nodes"), 1)
    version = str(data.get("recipe_version", ""))
    return Recipe(
        kind=f"a recipe of sparkrun or spark-vllm-docker, version {version[:20] or 'not said'}",
        repository=str(data.get("model")),
        words=words,
        environment={**_mapping(data.get("env")), **exported},
        revision=str(data.get("model_revision") or "main"),
        summary=str(data.get("description") or data.get("name") or ""),
        nodes=max(nodes, 2) if data.get("cluster_only") is True else nodes,
        unused=[*unused, *_others(data, used)],
    )


def _filled(text: str, values: Mapping[str, Any], source: str) -> str:
    """Return a command with the defaults in their places."""
    said = {name: str(value) for name, value in values.items()}
    if len(text) * max(map(len, said.values())) > _MOST_CHARACTERS:
        raise CatalogError.one(source, "its command is too long to be one", "take another recipe")
    return re.sub(r"\{(\w+)\}", lambda one: said.get(one[1], one[0]), text)


def _of_defaults(defaults: Mapping[str, Any]) -> Iterator[str]:
    for name, value in defaults.items():
        flag = f"--{str(name).replace('_', '-')}"
        if value is True:
            yield flag
        elif value is not False and value is not None:
            yield from (flag, str(value))


def _nvidia(data: Mapping[str, Any]) -> Recipe:
    serve, checkpoint = _mapping(data.get("serve")), _mapping(data.get("checkpoint"))
    topology = _mapping(data.get("topology"))
    told = str(serve.get("command") or "")
    words, exported, unused = _served(told)
    used = {"schema_version", "title", "model", "serve", "checkpoint", "topology", "backend",
            "hardware"}  # fmt: skip
    inner = [f"serve.{key}: {_OURS}" for key in serve if key not in ("command", "label", "target")]
    draft = checkpoint.get("draft_label")
    recipe = Recipe(
        kind="a recipe.yaml of NVIDIA/local-ai-inference-recipes",
        repository=str(checkpoint.get("target_label") or checkpoint.get("target") or ""),
        words=words,
        environment=exported,
        summary=str(data.get("title") or ""),
        nodes=_count(topology.get("node_count"), 1),
        unused=[*unused, *inner, *_others(data, used)],
    )
    if draft and str(draft) not in told:
        recipe.unused.append(f"checkpoint.draft {draft}: the command does not say it")
    if data.get("backend") not in (None, "vllm"):
        recipe.open.append(f"it is for {data['backend']}; here vLLM serves")
    return recipe


def _vllm_project(data: Mapping[str, Any]) -> Recipe:
    """Its arguments lie in pieces: the model's, features that are on, the variant's, the host's."""
    model, meta = _mapping(data.get("model")), _mapping(data.get("meta"))
    features = _mapping(data.get("features"))
    chosen = _variant(_mapping(data.get("variants")))
    variant = _mapping(_mapping(data.get("variants")).get(chosen))
    hosts = [_mapping(_mapping(part.get("hardware_overrides")).get(_SPARK))
             for part in (data, variant)]  # fmt: skip
    opt_in = set(_words(data.get("opt_in_features")))
    words = _words(model.get("base_args"))
    unused = [f"features.{name}: it is opt-in" for name in sorted(opt_in & features.keys())]
    for name, feature in features.items():
        if name not in opt_in and name in ("tool_calling", "reasoning"):
            words += _words(_mapping(feature).get("args"))
        elif name not in opt_in:
            unused.append(f"features.{name}: only tool calling and reasoning are taken")
    for part in (variant, *hosts):
        words += _words(part.get("extra_args"))
    environment = {**_mapping(model.get("base_env")), **_mapping(variant.get("extra_env"))}
    for part in hosts:
        environment |= _mapping(part.get("extra_env"))
    others = [f"variants.{name}" for name in _mapping(data.get("variants")) if name != chosen]
    used = {"meta", "model", "features", "opt_in_features", "variants", "hardware_overrides"}
    recipe = Recipe(
        kind=f"a document of vllm-project/recipes, variant {chosen[:40]}",
        repository=str(variant.get("model_id") or model.get("model_id") or ""),
        words=words,
        environment=environment,
        summary=str(meta.get("title") or ""),
        unused=[*unused, *others, *_others(data, used)],
    )
    recipe.unused += [f"model.{key}: {_WHY_NOT.get(key, 'is about the model, not its engine')}"
                      for key in model.keys() - _OF_MODEL]  # fmt: skip
    recipe.unused += [f"variants.{chosen}.{key}: {_WHY_NOT.get(key, 'describes it')}"
                      for key in variant.keys() - _OF_VARIANT]  # fmt: skip
    if model.get("min_vllm_version"):
        recipe.open.append(f"it asks for vLLM {str(model['min_vllm_version'])[:20]} or later")
    if _mapping(meta.get("hardware")).get(_SPARK) != "verified":
        recipe.open.append("its authors do not call it verified on a DGX Spark")
    return recipe


def _variant(variants: Mapping[str, Any]) -> str:
    """Return the variant that says something of a Spark; else the default."""
    for name, one in variants.items():
        if _SPARK in _mapping(_mapping(one).get("hardware_overrides")):
            return str(name)
    return "default" if "default" in variants else str(next(iter(variants), "default"))


def _served(command: str) -> tuple[list[str], dict[str, Any], list[str]]:
    """Return the words after ``vllm serve MODEL``, variables set before, and what is not used."""
    text = re.sub(r"^[ \t]*#.*$", "", command.replace("\\\n", " "), flags=re.MULTILINE)
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if "serve" not in words:
        return [], {}, ["command: it does not call `vllm serve`"] if command.strip() else []
    at = words.index("serve")
    ends = next((n for n, word in enumerate(words) if n > at and _SHELL.match(word)), len(words))
    exported = dict(word.split("=", 1) for word in words[:at] if _ASSIGNED.match(word))
    others = [
        word for word in (*words[:at], *words[ends:]) if word.split("=", 1)[0] not in exported
    ]
    unused = [
        f"command: {word}: only `vllm serve`, its arguments and its environment are taken"
        for word in others
        if word not in ("vllm", "exec", "export")
    ]
    after = words[at + 1 : ends]
    return after[1:] if after and not after[0].startswith("-") else after, exported, unused


def _others(data: Mapping[str, Any], used: Iterable[str]) -> list[str]:
    """Name every key that has no part in what is written, and why."""
    left = (str(key) for key in data if key not in set(used))
    return [f"{key}: {_WHY_NOT.get(key, 'says nothing that a catalog file holds')}" for key in left]


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _count(value: Any, otherwise: int) -> int:
    return value if type(value) is int and 0 < value < 1024 else otherwise
