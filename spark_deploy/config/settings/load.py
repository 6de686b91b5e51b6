"""Read YAML files and ``--data`` into a frozen ``Settings`` for each host.

Later wins: the checkout's ``group_vars/all.yml`` (every default), then next to the inventory
``group_vars/all.yml``, ``group_vars/<group>.yml`` and ``host_vars/<host>.yml``, then ``--data``.
Mappings merge key by key, lists are replaced. All mistakes of all hosts are reported at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
import subprocess
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spark_deploy.config.checkout import CHECKOUT, catalog_names
from spark_deploy.config.documents import KeyPath, Violation, convert, violations
from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.schema_errors import dotted, problems_of
from spark_deploy.config.settings.engine import VLLM_NAMES, EngineSettings
from spark_deploy.config.settings.patterns import control_characters
from spark_deploy.config.settings.secrets import SecretRef
from spark_deploy.config.settings.service import RequantizeSettings
from spark_deploy.config.settings.types import CheckedSettings, Settings
from spark_deploy.config.yaml_files import load_schema, read_mapping


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of a host and their origin; ``root`` contains group_vars."""

    host: str
    group: str
    root: Path
    settings: Settings
    data: dict[str, Any]  # the same, as merged from the files: shown by `debug-inventory`

    @property
    def lock_path(self) -> Path:
        return self.root / self.settings.lock_file


@dataclass(frozen=True, slots=True)
class Layer:
    shown: str
    data: dict[str, Any]


def load_hosts(
    groups: Mapping[str, Sequence[str]],
    *,
    root: Path,
    overrides: Mapping[str, Any] | None = None,
    generated: Mapping[str, Any] | None = None,
    checkout: Path = CHECKOUT,
    must_serve: bool = True,
) -> dict[str, HostSettings]:
    """Return the settings of every host, or raise an error with all mistakes.

    Args:
        groups: host names by group; a host belongs to a single group.
        root: folder holding the ``group_vars`` and ``host_vars`` of the inventory.
        overrides: ``--data`` of the command line, dotted keys allowed.
        generated: settings computed by the inventory; they rank between group and host files.
        checkout: folder with defaults, schemas and catalog.
        must_serve: whether models and profiles must be in a catalog.
    """
    problems: list[Problem] = []
    common = _common_layers(root, checkout, problems)
    data = _rename_vllm_keys(undot(overrides or {}), "--data", problems)
    last = [Layer("--data", data)] if overrides else []
    loaded: dict[str, HostSettings] = {}
    for group, hosts in groups.items():
        middle = _file_layer(root / "group_vars" / f"{group}.yml", root, checkout, problems)
        generated_layers = [Layer("inventory", undot(generated))] if generated else []
        usual: HostSettings | None = None  # the same for all hosts without a file
        for host in hosts:
            if host in loaded:
                fix = "list every host in a single group"
                problems.append(Problem(host, "is in two groups of the inventory", fix))
                continue
            name = host.removeprefix("@")
            host_file = root / "host_vars" / f"{name}.yml"
            host_layers = _file_layer(host_file, root, checkout, problems)
            layers = [*common, *middle, *generated_layers, *host_layers, *last]
            made = None if host_layers else usual
            if made is None:
                made = _host_settings(host, group, root, layers, checkout, problems, must_serve)
            usual = usual if host_layers else made
            loaded[host] = _as_host(made, host)
    if problems:
        raise SettingsError(list(dict.fromkeys(problems)))
    return loaded


def with_values(host: HostSettings, values: Mapping[str, Any], shown: str) -> HostSettings:
    """Return the settings of a host with other values of dotted keys.

    Raises:
        SettingsError: with all mistakes; ``shown`` is where they are.
    """
    problems: list[Problem] = []
    new = _rename_vllm_keys(undot(values), shown, problems)
    layers = [Layer(host.host, host.data), Layer(shown, new)]
    made = _host_settings(
        host.host, host.group, host.root, layers, CHECKOUT, problems, must_serve=True
    )
    if problems:
        raise SettingsError(problems)
    made = _as_host(made, host.host)
    # The inventory may have supplied the address.
    ssh, known = made.settings.ssh, host.settings.ssh
    ssh = dataclasses.replace(ssh, hostname=ssh.hostname or known.hostname)
    return dataclasses.replace(made, settings=dataclasses.replace(made.settings, ssh=ssh))


def merge(
    base: dict[str, Any], new: Mapping[str, Any], *, keep_on_null: bool = True
) -> dict[str, Any]:
    """Return ``base`` with ``new`` merged in: mappings by key, other values replaced.

    With ``keep_on_null`` an empty mapping (``serve:`` with all keys commented out) changes nothing;
    otherwise null removes the mapping.
    """
    merged = dict(base)
    for key, value in new.items():
        old = merged.get(key)
        if isinstance(old, dict) and value is None and keep_on_null:
            continue
        if isinstance(old, dict) and isinstance(value, Mapping):
            merged[key] = merge(old, value, keep_on_null=keep_on_null)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def undot(data: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"serve.port": 1}`` into ``{"serve": {"port": 1}}``."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        for part in reversed(key.split(".")[1:]):
            value = {part: value}
        result = merge(result, {key.split(".")[0]: value})
    return result


def _common_layers(root: Path, checkout: Path, problems: list[Problem]) -> list[Layer]:
    paths = [checkout / "group_vars" / "all.yml"]
    if root.resolve() != checkout.resolve():
        paths.append(root / "group_vars" / "all.yml")
    return [layer for path in paths for layer in _file_layer(path, root, checkout, problems)]


def _file_layer(path: Path, root: Path, checkout: Path, problems: list[Problem]) -> list[Layer]:
    if not path.exists():
        return []
    base = root if path.is_relative_to(root) else checkout
    shown = path.relative_to(base).as_posix()
    data, mistakes = read_mapping(path, shown=shown)
    problems.extend(mistakes)
    return [Layer(shown, _rename_vllm_keys(data, shown, problems))]


def _rename_vllm_keys(data: dict[str, Any], shown: str, problems: list[Problem]) -> dict[str, Any]:
    services = data.get("services")
    owners: dict[str, Any] = {"": data}
    if isinstance(services, dict):
        owners |= {f"services.{name}.": service for name, service in services.items()}
    for place, owner in owners.items():
        engine = owner.get("engine") if isinstance(owner, dict) else None
        if not isinstance(engine, dict):
            continue
        for alias in engine.keys() & VLLM_NAMES.keys():
            name = VLLM_NAMES[alias]
            if name in engine:
                where, message = f"{shown}: {place}engine.{alias}", f"is another name of {name}"
                problems.append(Problem(where, message, "keep only one"))
            engine[name] = engine.pop(alias)
    return data


def _host_settings(
    host: str,
    group: str,
    root: Path,
    layers: Sequence[Layer],
    checkout: Path,
    problems: list[Problem],
    must_serve: bool,
) -> HostSettings:
    data: dict[str, Any] = {}
    for layer in layers:
        data = merge(data, layer.data)

    def where(path: KeyPath) -> str:
        return _origin(layers, path)

    schema = load_schema("settings", checkout=checkout)
    mistakes = [
        Problem(
            f"{where(place)}: {dotted(place)}",
            "contains a line break or control character",
            "write a single line",
        )
        for place in control_characters(data)
        if place[:2] != ("engine", "options")  # may be JSON text; a separate argument
    ]
    mistakes += problems_of(data, schema, where)
    settings = typing.cast(Settings, None)
    if not mistakes:
        names = functools.partial(catalog_names, checkout=checkout, own=root)
        try:
            settings = convert(CheckedSettings, data, names if must_serve else None)
        except ValidationError as error:
            mistakes = [
                Problem(f"{where(broken.set_by or broken.key)}: {dotted(broken.key)}",
                        broken.what, broken.fix)
                for broken in violations(error)
            ]  # fmt: skip
    if not mistakes:
        # The content of local files becomes part of the settings.
        engine = with_template(settings.engine, root)
        texts = with_calibration(settings.requantize, root)
        for section, read in (("engine", engine), ("requantize", texts)):
            if isinstance(read, Violation):
                place = (section, *read.key)
                mistakes.append(Problem(f"{where(place)}: {dotted(place)}", read.what, read.fix))
        if not (isinstance(engine, Violation) or isinstance(texts, Violation)):
            settings = dataclasses.replace(settings, engine=engine, requantize=texts)
    problems.extend(mistakes)
    return HostSettings(host, group, root, settings, data)


def _as_host(made: HostSettings, host: str) -> HostSettings:
    """Return the settings of a host; only listed hosts belong to a cluster or to replicas."""
    settings = made.settings
    if not settings:  # with mistakes, which are reported later
        return made
    cluster, replicas = settings.cluster, settings.replicas
    if host not in cluster.hosts:
        settings = dataclasses.replace(settings, cluster=dataclasses.replace(cluster, hosts=()))
    if host not in replicas.hosts:
        settings = dataclasses.replace(settings, replicas=type(replicas)())
    return dataclasses.replace(made, host=host, settings=settings)


def _origin(layers: Sequence[Layer], path: KeyPath) -> str:
    for layer in reversed(layers):
        data: Any = layer.data
        for part in path:
            if isinstance(data, dict) and part in data:
                data = data[str(part)]
            elif isinstance(part, int) and isinstance(data, list):
                break
            else:
                break
        else:
            return layer.shown
        if isinstance(data, list):
            return layer.shown
    return layers[0].shown if layers else "settings"


OPTION = "chat-template"
LARGEST_BYTES = 65_536
"""Half of what Linux allows for an argument."""
_KEY = ("chat_template",)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")  # but for tab and line feed


def with_template(engine: EngineSettings, root: Path) -> EngineSettings | Violation:
    """Return the settings with the template's text as engine option, or the problem.

    Args:
        engine: settings that follow their schema.
        root: folder of the inventory, for relative paths.
    """
    if engine.chat_template is None:
        return engine
    if any(name.replace("_", "-") == OPTION for name in engine.options):
        return Violation(_KEY, f"and engine.options both set {OPTION}", "keep only one")
    path = root / Path(engine.chat_template).expanduser()
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read ({type(error).__name__})"
        return Violation(_KEY, message, "set it to a text file on this machine")
    if wrong := _template_problem(text):
        return Violation(_KEY, f"{path} {wrong}", "set it to a file with a Jinja chat template")
    return dataclasses.replace(engine, options={**engine.options, OPTION: text})


def _template_problem(text: str) -> str | None:
    if len(text.encode()) > LARGEST_BYTES:
        return f"is larger than {LARGEST_BYTES} bytes"
    if _CONTROL.search(text):
        return "contains a control character"
    if "messages" not in text or "{" not in text:
        return "does not use the variable messages"
    if text.startswith("-"):
        return "starts with '-', like an option of the engine"
    return None


MAX_CALIBRATION_BYTES = 64 << 20


def with_calibration(requantize: RequantizeSettings, root: Path) -> RequantizeSettings | Violation:
    """Return the settings with the content of the calibration file, or the problem.

    Args:
        requantize: settings that follow their schema.
        root: folder of the inventory, for relative paths.
    """
    if requantize.calibration is None:
        return requantize
    path = root / Path(requantize.calibration).expanduser()
    fix = 'use a local file of JSON lines, each {"text": "..."}'
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Violation(("calibration",), f"{path} cannot be read ({type(error).__name__})", fix)
    if len(text) > MAX_CALIBRATION_BYTES:
        return Violation(
            ("calibration",),
            f"{path} is larger than {MAX_CALIBRATION_BYTES} bytes",
            "use a smaller file",
        )
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            sample = json.loads(line)
        except ValueError:
            sample = None
        if not isinstance(sample, dict) or not isinstance(sample.get("text"), str):
            return Violation(("calibration",), f"{path}, line {number} has no text", fix)
    if not lines:
        return Violation(("calibration",), f"{path} is empty", fix)
    return dataclasses.replace(requantize, calibration=text)


# Secrets that settings refer to.
_TIMEOUT_S = 60


def read_secret(reference: SecretRef, *, setting: str) -> str:
    """Return the secret behind ``reference``; ``setting`` is named in errors, the secret never.

    Wrap the result in pyinfra's ``HiddenValue`` and send it on standard input only.
    """
    fix = "correct the setting; no host was changed"
    try:
        text = _text_of(reference)
    except ValueError as error:
        raise SettingsError.one(setting, str(error), fix) from error
    lines = text.strip().splitlines()
    if not lines:
        raise SettingsError.one(setting, "the secret is empty", fix)
    return lines[0].strip()


def _text_of(reference: SecretRef) -> str:
    if reference.env:
        if not os.environ.get(reference.env):
            raise ValueError(f"the environment variable {reference.env} is not set")
        return os.environ[reference.env]
    if reference.file:
        try:
            return Path(reference.file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{reference.file} cannot be read ({type(error).__name__})") from None
    if reference.command:
        return _command_output(reference.command)
    raise ValueError("is generated on the host and cannot be read here")


def _command_output(argv: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise ValueError(f"{argv[0]} cannot be run ({type(error).__name__})") from None
    if done.returncode:
        raise ValueError(f"{argv[0]} failed with exit status {done.returncode}")
    return done.stdout
