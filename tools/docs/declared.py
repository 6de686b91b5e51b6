"""Files generated from declarations: schemas, ``group_vars/all.yml``, the settings page."""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import click
import yaml

from spark_deploy.bench.result import BenchResult
from spark_deploy.cli import GROUP
from spark_deploy.config.catalog.guard_rails import GuardRails, OpenQuestions
from spark_deploy.config.catalog.model import HybridModel, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.catalog.types import Engines, Families
from spark_deploy.config.documents import schema_of, to_yaml_data
from spark_deploy.config.settings.patterns import SecretRef
from spark_deploy.config.settings.types import COMMAND_FLAGS, EXPERT, Settings
from spark_deploy.inventory.groups import HostList
from spark_deploy.lock.types import Lock

SHARED = {"inventory", "limit", "exclude", "data", "json", "model", "profile", "dry"}
CHANGING = {"dry", "yes", "verbose"}


def command_rows() -> Iterator[str]:
    yield from ("| command | effect | options |", "|---|---|---|")
    context = click.Context(GROUP)
    for name in GROUP.list_commands(context):
        command = GROUP.get_command(context, name)
        assert command is not None
        changes_hosts = {option.name for option in command.params} >= CHANGING
        cells = (
            f"`{name}{_arguments(command)}`" + (" *" if changes_hosts else ""),
            str(command.help),
            "<br>".join(_options(command, changes_hosts)),
        )
        yield f"| {' | '.join(cells)} |"


def _arguments(command: click.Command) -> str:
    arguments = [part for part in command.params if isinstance(part, click.Argument)]
    names = (part.metavar or part.human_readable_name for part in arguments)
    without_hosts = (name.removesuffix("[HOST]...").strip() for name in names)
    return "".join(f" {name}" for name in without_hosts if name).replace("|", "\\|")


def _options(command: click.Command, changes_hosts: bool) -> Iterator[str]:
    described = SHARED | CHANGING if changes_hosts else SHARED
    for part in command.params:
        if isinstance(part, click.Option) and part.name not in described:
            metavar = f" {part.metavar}" if part.metavar else ""
            yield f"`{', '.join(part.opts)}{metavar}` {part.help}"


DOCUMENTS = {
    "settings": Settings,
    "model": HybridModel,
    "plain_model": PlainModel,
    "profile": Profile,
    "guard_rails": GuardRails,
    "hosts": HostList,
    "engines": Engines,
    "families": Families,
    "lock": Lock,
    "bench": BenchResult,
    "open_questions": OpenQuestions,
}
WIDTH = 100
TYPES = {"string": "text", "object": "mapping", "array": "list", "boolean": "true/false"}


def schema_file(name: str) -> Iterator[str]:
    yield json.dumps(schema_of(DOCUMENTS[name], name), indent=2, ensure_ascii=False)


def all_yml() -> Iterator[str]:
    keys, defaults = schema_of(Settings, "settings")["properties"], to_yaml_data(Settings())
    yield from ALL_YML_HEAD.splitlines()
    for key, part in keys.items():
        if key in HEADINGS:
            heading, _, text = HEADINGS[key].partition("\n")
            yield from ("", f"# --- {heading} ".ljust(WIDTH - 5, "-"))
            yield from ("#", *_comment(text)) if text else ()
        yield ""
        if "properties" not in part:
            yield from _entry(key, part, defaults[key])
            continue
        inside = {
            k: v
            for k, v in part["properties"].items()
            if f"{key}.{k}" not in COMMAND_FLAGS and k in defaults[key]
        }
        if not inside:
            continue
        yield from (*_comment(part["description"]), f"{key}:")
        for inner, inner_part in inside.items():
            yield from textwrap.indent(
                "\n".join(_entry(inner, inner_part, defaults[key][inner])), "  "
            ).splitlines()


def _entry(key: str, part: dict[str, Any], value: Any) -> Iterator[str]:
    text = part["description"]
    examples = [example for example in part.get("examples", ()) if example != value]
    if examples:
        text += f" Example: {_flow(examples[0])}"
    lines = [f"{key}: {_flow(value)}"]
    if isinstance(value, dict) and value:
        lines = [f"{key}:", *(f"  {name}: {_flow(item)}" for name, item in value.items())]
    if len(lines) == 1 and len(lines[0]) + len(text) < WIDTH - 6:
        yield f"{lines[0]}  # {text}"
    else:
        yield from (*_comment(text), *lines)


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH - 4, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def settings_page() -> Iterator[str]:
    schema, defaults = schema_of(Settings, "settings"), to_yaml_data(Settings())
    yield "<!-- generated from spark_deploy/config/settings by `make docs` -->"
    yield from ("# Settings", "", SETTINGS_INTRODUCTION)
    everything = dict(_leaves(schema["properties"], defaults))
    usual = {key: leaf for key, leaf in everything.items() if key not in COMMAND_FLAGS | EXPERT}
    yield from _section("Common settings", "", usual)
    expert = {key: everything[key] for key in everything if key in EXPERT}
    yield from _section("Expert settings", "Most hosts need none of these settings.", expert)
    flags = {key: everything[key] for key in everything if key in COMMAND_FLAGS}
    yield from _section(
        "Options of a command", "Pass these settings to the command or deploy with `--data`.", flags
    )
    yield from ("", "## Entries", "", ENTRIES_INTRODUCTION, "")
    yield from _entry_rows("SECRET", schema_of(SecretRef, "secret"))
    for key, (part, _) in everything.items():
        if "properties" in (part.get("items") or {}):
            yield from _entry_rows(f"{key}[]", part["items"])
        elif isinstance(each := part.get("additionalProperties"), dict) and "properties" in each:
            yield from _entry_rows(f"{key}.NAME", each)


Leaf = tuple[dict[str, Any], str]  # schema and default


def _leaves(properties: dict[str, Any], defaults: dict[str, Any]) -> Iterator[tuple[str, Leaf]]:
    for key, part in properties.items():
        for inner, leaf in part.get("properties", {}).items():
            if inner not in defaults[key]:  # vLLM's name for another setting
                continue
            yield f"{key}.{inner}", (leaf, f"`{json.dumps(defaults[key][inner])}`")
        if "properties" not in part:
            yield key, (part, f"`{json.dumps(defaults[key])}`")


def _entry_rows(prefix: str, part: dict[str, Any]) -> Iterator[str]:
    for key, inner in part["properties"].items():
        yield f"- `{prefix}.{key}` ({_form(inner)}): {inner['description']}"


EMPTY = ("`null`", "`[]`", "`{}`")


def _section(title: str, text: str, keys: dict[str, Leaf]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    if text:
        yield from (text, "")
    for key, (part, default) in keys.items():
        facts = re.sub(r"( or|,) null$", "", _form(part)) if default == "`null`" else _form(part)
        if default not in EMPTY:
            facts += f", default {default}"
        yield f"- `{key}` ({facts}): {part['description']}"


def _form(part: dict[str, Any]) -> str:
    if "enum" in part:
        known = (value for value in part["enum"] if value is not False)
        return ", ".join("null" if value is None else f"`{value}`" for value in known)
    if "anyOf" in part:
        return " or ".join(map(_form, part["anyOf"]))
    if "const" in part:
        return f"`{part['const']}`"
    if "env" in part.get("properties", {}):
        return "a secret or null" if "null" in part["type"] else "a secret"
    kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
    return " or ".join(TYPES.get(str(kind), str(kind)) for kind in kinds)


def row(*cells: object) -> str:
    texts = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(texts)} |")


HEADINGS = {
    "model": "Model and service\n"
    "A release contains model, profile, engine, memory, watch, check, and the names and time "
    "limits of serve. A change of these settings restarts and checks the engine; if the check "
    "fails, the previous release returns. Port, exposure, TLS, keys and request limits need no "
    "restart.",
    "memory": "Memory: one pool for CPU and GPU",
    "lock_file": "Sources",
    "expect": "Host requirements",
    "base": "Host setup",
    "ssh": "SSH",
}

ALL_YML_HEAD = """\
# yaml-language-server: $schema=../schema/settings.schema.json
#
# All settings with defaults. Generated: every version replaces this file. Write your changes
# into group_vars/all.yml of your own folder, group_vars/<group>.yml (hosts of a group) or
# host_vars/<host>.yml (one host). Later wins: these defaults < group_vars/all.yml of your own <
# group < host < --data key=value. Mappings are merged by key; lists are replaced."""

SETTINGS_INTRODUCTION = (
    "To change a setting, run `spark-deploy set KEY=VALUE`, or edit `group_vars/all.yml` (all "
    "hosts), `group_vars/<group>.yml` or `host_vars/<host>.yml` in the folder that "
    "`spark-deploy init` created. Then run `spark-deploy up`. A host's value overrides the group's "
    "value, and `--data key=value` overrides both (`--data serve.port=9000`). A host's "
    "mapping is merged with the group's, and a host's list replaces the group's.\n\n"
    "Settings without a default are empty or `null`. Unless the description says otherwise, "
    "`null` leaves the choice to the profile or the system. "
    "Under `engine` you can also use vLLM's names `max_model_len`, `max_num_seqs`, "
    "`gpu_memory_utilization` and `num_speculative_tokens`."
)

ENTRIES_INTRODUCTION = (
    "These keys are allowed in entries of lists (`[]`) and mappings (`NAME`). A secret has exactly "
    "one of its keys."
)
