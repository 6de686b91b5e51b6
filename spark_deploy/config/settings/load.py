"""Read YAML files and ``--data`` into a frozen ``Settings`` for each host.

Later values win: the checkout's ``group_vars/all.yml`` (all defaults), then next to the inventory
``group_vars/all.yml``, ``group_vars/<group>.yml`` and ``host_vars/<host>.yml``, then ``--data``.
"""

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
from typing import Any, TypeVar

from pydantic import ValidationError

from spark_deploy.config.checkout import CHECKOUT, catalog_files, load_schema, read_mapping
from spark_deploy.config.documents import KeyPath, Violation, convert, violations
from spark_deploy.config.errors import Problem, SettingsError
from spark_deploy.config.schema_errors import dotted, schema_problems
from spark_deploy.config.settings.engine import (
    VLLM_NAMES,
    EngineSettings,
    ServiceEngineSettings,
)
from spark_deploy.config.settings.patterns import SecretRef, paths_with_control_characters
from spark_deploy.config.settings.service import RequantizeSettings
from spark_deploy.config.settings.types import CheckedSettings, Settings


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of a host; ``root`` contains group_vars."""

    host: str
    group: str
    root: Path
    settings: Settings
    data: dict[str, Any]  # the merged data, which pyinfra's `debug-inventory` prints

    @property
    def lock_path(self) -> Path:
        return self.root / self.settings.lock_file


@dataclass(frozen=True, slots=True)
class _Layer:
    """Settings of one file or other source; ``label`` is its name in messages."""

    label: str
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
    """Return the settings of each host. Raises SettingsError with all problems."""
    reader = _Reader(root, checkout, must_serve)
    common = reader.file_layers(checkout / "group_vars" / "all.yml")
    if root.resolve() != checkout.resolve():
        common += reader.file_layers(root / "group_vars" / "all.yml")
    overriding = reader.layers("--data", nest_dotted_keys(overrides)) if overrides else []
    loaded: dict[str, HostSettings] = {}
    for group, hosts in groups.items():
        group_layers = reader.file_layers(root / "group_vars" / f"{group}.yml")
        if generated:
            group_layers.append(_Layer("inventory", nest_dotted_keys(generated)))
        shared: HostSettings | None = None  # settings of hosts without a file
        for host in hosts:
            name = host.removeprefix("@")
            host_layers = reader.file_layers(root / "host_vars" / f"{name}.yml")
            layers = [*common, *group_layers, *host_layers, *overriding]
            if host_layers:
                settings = reader.host_settings(host, group, layers)
            else:
                settings = shared = shared or reader.host_settings(host, group, layers)
            loaded[host] = _for_host(settings, host)
    if reader.problems:
        raise SettingsError(list(dict.fromkeys(reader.problems)))
    return loaded


def with_overrides(host: HostSettings, values: Mapping[str, Any], label: str) -> HostSettings:
    """Return the settings of a host with new values for dotted keys.

    Errors name ``label`` as the source of the values.
    """
    reader = _Reader(host.root, CHECKOUT, must_serve=True)
    layers = [_Layer(host.host, host.data), *reader.layers(label, nest_dotted_keys(values))]
    changed = reader.host_settings(host.host, host.group, layers)
    if reader.problems:
        raise SettingsError(reader.problems)
    changed = _for_host(changed, host.host)
    # The inventory may have set the address.
    ssh = changed.settings.ssh
    ssh = dataclasses.replace(ssh, hostname=ssh.hostname or host.settings.ssh.hostname)
    settings = dataclasses.replace(changed.settings, ssh=ssh)
    return dataclasses.replace(changed, settings=settings)


def merge(
    base: dict[str, Any], new: Mapping[str, Any], *, keep_on_null: bool = True
) -> dict[str, Any]:
    """Merge ``new`` into a copy of ``base``, mappings key by key.

    If ``new`` has null for a mapping (``serve:`` with all keys commented out), ``keep_on_null``
    keeps the mapping.
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


def nest_dotted_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"serve.port": 1}`` into ``{"serve": {"port": 1}}``."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        nested = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        result = merge(result, nested)
    return result


@dataclass(frozen=True, slots=True)
class _Reader:
    root: Path
    checkout: Path
    must_serve: bool
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def file_layers(self, path: Path) -> list[_Layer]:
        if not path.exists():
            return []
        folder = self.root if path.is_relative_to(self.root) else self.checkout
        label = path.relative_to(folder).as_posix()
        data, problems = read_mapping(path, label=label)
        self.problems.extend(problems)
        return self.layers(label, data)

    def layers(self, label: str, data: dict[str, Any]) -> list[_Layer]:
        """Return the data as a layer, with vLLM's names for engine settings replaced by ours."""
        services = data.get("services")
        sections: dict[str, Any] = {"": data}
        if isinstance(services, dict):
            sections |= {f"services.{name}.": service for name, service in services.items()}
        for prefix, section in sections.items():
            engine = section.get("engine") if isinstance(section, dict) else None
            if not isinstance(engine, dict):
                continue
            for alias in engine.keys() & VLLM_NAMES.keys():
                name = VLLM_NAMES[alias]
                if name in engine:
                    where = f"{label}: {prefix}engine.{alias}"
                    message = f"is another name for {name}"
                    self.problems.append(Problem(where, message, "keep only one"))
                engine[name] = engine.pop(alias)
        return [_Layer(label, data)]

    def host_settings(self, host: str, group: str, layers: Sequence[_Layer]) -> HostSettings:
        """Merge and validate layers; the settings are ``None`` if there are problems."""
        data: dict[str, Any] = {}
        for layer in layers:
            data = merge(data, layer.data)

        def problem(violation: Violation) -> Problem:
            file = _origin(layers, violation.set_by or violation.key)
            where = f"{file}: {dotted(violation.key)}"
            return Problem(where, violation.what, violation.fix)

        message, fix = "the value contains a line break or control character", "write a single line"
        problems = [
            problem(Violation(path, message, fix))
            for path in paths_with_control_characters(data)
            if path[:2] != ("engine", "options")  # JSON text, which stays a single argument
        ]
        schema = load_schema("settings", checkout=self.checkout)
        problems += schema_problems(data, schema, functools.partial(_origin, layers))
        settings = typing.cast(Settings, None)
        if not problems:
            names = functools.partial(catalog_files, checkout=self.checkout, user_dir=self.root)
            try:
                checked = convert(CheckedSettings, data, names if self.must_serve else None)
                settings = _with_local_files(checked, self.root)
            except ValidationError as error:
                problems = list(map(problem, violations(error)))
            except _LocalFileError as error:
                problems = list(map(problem, error.violations))
        self.problems.extend(problems)
        return HostSettings(host, group, self.root, settings, data)


def _for_host(loaded: HostSettings, host: str) -> HostSettings:
    """Return a host's settings, without a cluster or replicas that do not include the host."""
    settings = loaded.settings
    if not settings:  # load_hosts reports the problems
        return loaded
    cluster, replicas = settings.cluster, settings.replicas
    if host not in cluster.hosts:
        settings = dataclasses.replace(settings, cluster=dataclasses.replace(cluster, hosts=()))
    if host not in replicas.hosts:
        settings = dataclasses.replace(settings, replicas=type(replicas)())
    return dataclasses.replace(loaded, host=host, settings=settings)


def _origin(layers: Sequence[_Layer], path: KeyPath) -> str:
    """Return the label of the last layer that sets a key."""
    for layer in reversed(layers):
        if _has_key(layer.data, path):
            return layer.label
    return layers[0].label if layers else "settings"


def _has_key(data: Any, path: KeyPath) -> bool:
    if not path or isinstance(data, list):
        return True
    return isinstance(data, dict) and path[0] in data and _has_key(data[str(path[0])], path[1:])


class _LocalFileError(Exception):
    def __init__(self, violations: Sequence[Violation]):
        self.violations = violations


def _with_local_files(settings: Settings, root: Path) -> Settings:
    """Return the settings with the text of local files in place of their paths."""
    engine: Any = _with_template(settings.engine, root)
    if not isinstance(engine, Violation):
        engine = _with_vocabulary_text(engine, root)
    requantize: Any = _with_calibration(settings.requantize, root)
    results: dict[KeyPath, Any] = {("engine",): engine, ("requantize",): requantize}
    for key in ("key_file", "known_hosts_file"):
        results["ssh", key] = _check_user(getattr(settings.ssh, key) or "")
    for name, service in settings.services.items():
        results["services", name, "engine"] = _with_template(service.engine, root)
    invalid = [
        result._replace(key=(*section, *result.key))
        for section, result in results.items()
        if isinstance(result, Violation)
    ]
    if invalid:
        raise _LocalFileError(invalid)
    services = {
        name: dataclasses.replace(service, engine=results["services", name, "engine"])
        for name, service in settings.services.items()
    }
    return dataclasses.replace(settings, engine=engine, requantize=requantize, services=services)


def _check_user(path: str) -> Violation | None:
    if not os.path.expanduser(path).startswith("~"):
        return None
    user = path[1:].partition("/")[0] or "the owner of this process"
    return Violation((), f"{user} is not a user of this machine", "write an absolute path")


_Engine = TypeVar("_Engine", bound=ServiceEngineSettings)
_TEMPLATE_OPTION = "chat-template"
_MAX_TEMPLATE_BYTES = 65_536  # half of Linux's limit for an argument
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")  # except tab and line feed


def _with_template(engine: _Engine, root: Path) -> _Engine | Violation:
    """Return the settings with the text of ``chat_template`` as an engine option."""
    if engine.chat_template is None:
        return engine
    key = ("chat_template",)
    if any(name.replace("_", "-") == _TEMPLATE_OPTION for name in engine.options):
        return Violation(key, f"engine.options also sets {_TEMPLATE_OPTION}", "keep only one")
    path = root / os.path.expanduser(engine.chat_template)
    text = _read_text(key, path, _MAX_TEMPLATE_BYTES, "set it to a Jinja file on this machine")
    if isinstance(text, Violation):
        return text
    if problem := _template_problem(text):
        return Violation(key, f"{path} {problem}", "set it to a file with a Jinja chat template")
    return dataclasses.replace(engine, options={**engine.options, _TEMPLATE_OPTION: text})


def _template_problem(text: str) -> str | None:
    if _CONTROL.search(text):
        return "contains a control character"
    if "messages" not in text or "{" not in text:
        return "does not use the `messages` variable"
    if text.startswith("-"):
        return "starts with '-', so the engine would parse it as an option"
    return None


_MAX_TEXT_BYTES = 64 << 20


def _read_text(key: KeyPath, path: Path, max_bytes: int, fix: str) -> str | Violation:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(max_bytes + 1)
    except (OSError, UnicodeDecodeError) as error:
        return Violation(key, f"{path} cannot be read ({type(error).__name__})", fix)
    if not text:
        return Violation(key, f"{path} is empty", fix)
    if len(text.encode()) > max_bytes:
        return Violation(key, f"{path} is larger than {max_bytes} bytes", "use a smaller file")
    return text


def _with_vocabulary_text(engine: EngineSettings, root: Path) -> EngineSettings | Violation:
    """Return the settings with the content of the file that ranks draft tokens."""
    if engine.draft_vocabulary_text is None:
        return engine
    key = ("draft_vocabulary_text",)
    path = root / os.path.expanduser(engine.draft_vocabulary_text)
    text = _read_text(key, path, _MAX_TEXT_BYTES, "set it to a UTF-8 text file on this machine")
    if isinstance(text, Violation):
        return text
    return dataclasses.replace(engine, draft_vocabulary_text=text)


def _with_calibration(requantize: RequantizeSettings, root: Path) -> RequantizeSettings | Violation:
    """Return the settings with the content of the calibration file, or a violation."""
    if requantize.calibration is None:
        return requantize
    key = ("calibration",)
    path = root / os.path.expanduser(requantize.calibration)
    fix = 'use a local file of JSON lines, each {"text": "..."}'
    text = _read_text(key, path, _MAX_TEXT_BYTES, fix)
    if isinstance(text, Violation):
        return text
    for number, line in enumerate(text.splitlines(), 1):
        try:
            sample = json.loads(line)
        except ValueError:
            sample = None
        if not isinstance(sample, dict) or not isinstance(sample.get("text"), str):
            return Violation(key, f"line {number} of {path} has no text", fix)
    return dataclasses.replace(requantize, calibration=text)


_SECRET_TIMEOUT_S = 60


def read_secret(reference: SecretRef, *, setting: str) -> str:
    """Read a secret; errors name the ``setting``, never the secret.

    Wrap the result in pyinfra's ``HiddenValue``, and send it only on standard input.
    """
    fix = "correct the setting; no host was changed"
    try:
        text = _read_reference(reference)
    except ValueError as error:
        raise SettingsError.single(setting, str(error), fix) from error
    lines = text.strip().splitlines()
    if not lines:
        raise SettingsError.single(setting, "the secret is empty", fix)
    return lines[0].strip()


def _read_reference(reference: SecretRef) -> str:
    if reference.env:
        if not os.environ.get(reference.env):
            raise ValueError(f"the environment variable {reference.env} is not set")
        return os.environ[reference.env]
    if reference.file:
        try:
            return Path(os.path.expanduser(reference.file)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{reference.file} cannot be read ({type(error).__name__})") from None
    if reference.command:
        return _command_output(reference.command)
    raise ValueError("the host generates this secret, so it cannot be read here")


def _command_output(argv: tuple[str, ...]) -> str:
    try:
        result = subprocess.run(
            argv, capture_output=True, text=True, timeout=_SECRET_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise ValueError(f"{argv[0]} cannot be run ({type(error).__name__})") from None
    if result.returncode:
        raise ValueError(f"{argv[0]} failed with exit status {result.returncode}")
    return result.stdout
