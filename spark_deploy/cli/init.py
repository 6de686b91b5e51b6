"""``spark-deploy init``: a folder with hosts, settings and schemas, ready for ``up``."""

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click
import yaml

from spark_deploy.cli import update
from spark_deploy.cli.console import (
    FOLDER,
    Options,
    command_path,
    model_option,
    note,
    print_result,
    profile_option,
    shared_options,
)
from spark_deploy.cli.models import PLAIN_PROFILE, SCHEMAS, find_fitting_profiles
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import Problem, SparkError
from spark_deploy.config.settings.types import Settings
from spark_deploy.inventory.groups import HOSTS_FILE, read_hosts
from spark_deploy.inventory.host_names import CONTEXT_KEY, LOCAL
from spark_deploy.inventory.plans import read_inventory

PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
INVENTORY = Path("inventory/spark.py")

INVENTORY_TEXT = '''\
"""The hosts of hosts.yml, for spark-deploy and pyinfra. No edits needed."""

from spark_deploy.inventory import hosts_of as _hosts_of

globals().update(_hosts_of(__file__))
'''
CONFIG_TEXT = '''\
"""pyinfra reads this file at startup; it rejects a missing inventory."""

from spark_deploy.inventory import check_inventory as _check_inventory

_check_inventory()
'''
HOSTS_HEAD = """\
# yaml-language-server: $schema=schema/hosts.schema.json
# Your Sparks: names from your SSH configuration, or names with an address:
#   spark-2: {address: 192.168.1.22, user: nvidia}
# "@local" is the machine that runs spark-deploy.
hosts:
"""
SETTINGS_TEXT = """\
# yaml-language-server: $schema=../schema/settings.schema.json
# Settings for all Sparks. Use the same keys in host_vars/NAME.yml for a single host.
model: MODEL
profile: PROFILE  # OTHERS

# Prepare another model or profile, so that a later switch needs no download or build:
# keep_ready:
#   - {model: MODEL, profile: ANOTHER}

# Access: loopback (SSH tunnel), docker, tailscale or lan. Clients need the API key.
# serve: {expose: lan, port: 8000}
# paths: {models_dir: /data/models}
# `spark-deploy settings` prints all settings with defaults.
"""
IGNORED = "/bench/\n/pyinfra-debug.log\n__pycache__/\n.*.new\n"


@click.command
@click.argument("directory", default=".", metavar="[DIR]", type=FOLDER)
@click.option("--host", multiple=True, metavar="NAME[=ADDRESS]", help="Add a Spark.")
@click.option("--user", metavar="NAME", help="Login user of these hosts.")
@click.option("--local", is_flag=True, help="Serve on this machine.")
@model_option("Model to serve.")
@profile_option("Profile to use.")
@shared_options(hosts=False)
def init(
    options: Options, directory: str, host: Sequence[str], user: str | None, local: bool
) -> int:
    """Write missing files and update schemas; keep all other files."""
    folder = Path(directory)
    host_lines = _host_lines(host, user) if host else _default_host_lines(folder, local)
    if host and (folder / HOSTS_FILE).exists():
        _reject_other_hosts(folder / HOSTS_FILE, host_lines)
    is_new = not folder.exists()
    texts = {
        folder / HOSTS_FILE: HOSTS_HEAD + "".join(host_lines),
        folder / "group_vars/all.yml": _settings_text(options.model, options.profile),
        folder / INVENTORY: INVENTORY_TEXT,
        folder / "config.py": CONFIG_TEXT,
        folder / ".gitignore": IGNORED,
    }
    written = [path for path in texts if not path.exists()]
    for path in written:
        _write(path, texts[path])
    try:
        read_hosts(folder / HOSTS_FILE)
        inventory = read_inventory(folder / INVENTORY)
    except SparkError:
        for path in written:  # otherwise the next `init` would keep the invalid files
            path.unlink()
            if path.parent != folder or is_new:
                with suppress(OSError):  # the folder is not empty
                    path.parent.rmdir()
        raise
    for name in SCHEMAS:
        path = folder / f"schema/{name}.schema.json"
        texts[path] = text = (CHECKOUT / f"schema/{name}.schema.json").read_text("utf-8")
        if not path.exists() or path.read_bytes() != text.encode():
            _write(path, text)
            written.append(path)
    for path in texts:
        note(f"{'written' if path in written else 'kept':<8} {path}")
    not_locked = _lock(folder)
    cd = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    command = f"{cd}{shlex.quote(command_path('spark-deploy'))} up"
    settings = {name: data[CONTEXT_KEY].loaded.settings for name, data in inventory.items()}
    data = {
        "folder": str(folder), "written": [str(path) for path in written],
        "kept": [str(path) for path in texts if path not in written],
        "hosts": [{"host": name, "model": host_settings.model, "profile": host_settings.profile}
                  for name, host_settings in settings.items()],
        "not_locked": not_locked, "next": [command],
    }  # fmt: skip
    hint = "      (to check first, run `spark-deploy plan` and `spark-deploy doctor`)"
    print_result(options, data, [[f"next: {command}", hint]])
    return 0


def _reject_other_hosts(file: Path, lines: Sequence[str]) -> None:
    """Reject hosts that are missing from an existing hosts.yml or have other values there."""
    present = read_hosts(file).hosts
    missing = [line.strip() for line in lines if not yaml.safe_load(line).keys() <= present.keys()]
    if missing:
        problem = "exists, and init does not change the file"
        fix = f"add to the file: {'; '.join(missing)}"
        raise SparkError.single(str(file), problem, fix)
    different = []
    for line in lines:
        [(name, given)] = yaml.safe_load(line).items()
        for field, value in (given or {}).items():
            if (current := getattr(present[name], field, None)) != str(value):
                where = f"{file}: {name}.{field}"
                message = f"is {current or 'not set'}, and init does not change the value"
                different.append(Problem(where, message, f"change the line to: {line.strip()}"))
    if different:
        raise SparkError(different)


def _default_host_lines(folder: Path, local: bool) -> list[str]:
    """Return lines for this machine or hosts that the user types; none if hosts.yml exists."""
    if (folder / HOSTS_FILE).exists():
        return []
    try:
        is_spark = "spark" in PRODUCT_NAME.read_text("utf-8").lower()
    except OSError:
        is_spark = False
    if local or (is_spark and not sys.stdin.isatty()):
        return _host_lines([LOCAL], None)
    if not sys.stdin.isatty():
        fix = "run `spark-deploy init DIR --host spark-1=192.168.1.21 --user nvidia`"
        problem = "no host was given, and there is no terminal on which to ask for one"
        raise SparkError.single("hosts", problem, fix)
    if is_spark and click.confirm(
        "This machine is a Spark. Serve models on it?", default=True, err=True
    ):
        return _host_lines([LOCAL], None)
    names = click.prompt("Names or addresses of your Sparks, separated by spaces", err=True)
    user = click.prompt(
        "Login user (leave empty for the SSH default)", default="", show_default=False, err=True
    )
    return _host_lines(re.findall(r"[^\s,]+", names), user or None)


def _host_lines(hosts: Sequence[str], user: str | None) -> list[str]:
    lines = []
    for number, host in enumerate(hosts, start=1):
        name, _, address = host.partition("=")
        login = user
        if "@" in address:
            login, _, address = address.partition("@")
        elif "@" in name and not name.startswith("@"):
            login, _, name = name.partition("@")
        if re.fullmatch(r"[\d.]+|.*:.*", name):  # an address, which cannot be the name
            name, address = f"spark-{number}", name
        values = {"address": address, "user": login if name != LOCAL else None}
        keys = ", ".join(f"{key}: {value}" for key, value in values.items() if value)
        quoted = f'"{name}"' if name.startswith("@") else name
        lines.append(f"  {quoted}: {{{keys}}}\n" if keys else f"  {quoted}:\n")
    return lines


def _settings_text(model: str | None, profile: str | None) -> str:
    catalog = read_catalog()
    model = model or Settings().model
    fitting = find_fitting_profiles(model, catalog)
    profiles = [name for name in fitting if not catalog.profile(name, model).only_compared]
    profile = profile or next(iter(profiles), Settings().profile)
    others = [name for name in profiles if name not in (profile, PLAIN_PROFILE)]
    values = {
        "MODEL": model,
        "PROFILE": profile,
        "OTHERS": f"or {', '.join(others)}: `spark-deploy models {model}`" if others else "",
        "ANOTHER": next(iter(others), profile),
    }
    return re.sub("|".join(values), lambda match: values[match[0]], SETTINGS_TEXT)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "choose a writable folder"
        raise SparkError.single(str(path), f"cannot be written: {error.strerror}", fix) from error


def _lock(folder: Path) -> str | None:
    """Lock the names in use; return the problem instead of raising, because `up` tries again."""
    try:
        update.lock_names(Options(inventory=str(folder / INVENTORY)), only_missing=True)
    except SparkError as error:
        problem = error.problems[0].what
        note(f"the lock file is incomplete: {problem}; `spark-deploy up` will complete it")
        return problem
    return None
