"""``spark-deploy init``: an owner's repository, ready for ``up``."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from spark_deploy.cli import update
from spark_deploy.cli.catalog_files import SCHEMAS
from spark_deploy.cli.options import FOLDER, Options, model_option, profile_option, shared_options
from spark_deploy.cli.terminal import command_path, note, print_result
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT, page
from spark_deploy.config.errors import SparkError
from spark_deploy.config.settings.types import Settings
from spark_deploy.inventory.host_names import KEY, LOCAL
from spark_deploy.inventory.hosts_file import HOSTS_FILE, read_hosts
from spark_deploy.inventory.plans import read_inventory
from spark_deploy.plan.resolve import resolve

PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
INVENTORY = Path("inventory/spark.py")

INVENTORY_TEXT = '''\
"""The hosts of hosts.yml, for spark-deploy and pyinfra. Nothing here needs a change."""

from spark_deploy.inventory import hosts_of as _hosts_of

globals().update(_hosts_of(__file__))
'''
CONFIG_TEXT = '''\
"""What pyinfra reads where it is started: an inventory that is not there is refused."""

from spark_deploy.inventory import check_inventory as _check_inventory

_check_inventory()
'''
HOSTS_HEAD = """\
# yaml-language-server: $schema=schema/hosts.schema.json
# Your Sparks. A name that ssh knows needs nothing behind its colon; else say how to reach it:
#   spark-2: {address: 192.168.1.22, user: nvidia}
# "@local" is the machine that spark-deploy itself runs on.
hosts:
"""
SETTINGS_TEXT = """\
# yaml-language-server: $schema=../schema/settings.schema.json
# What your Sparks serve. For one host alone: host_vars/NAME.yml, with the same keys.
model: MODEL
profile: PROFILE  # OTHERS

# Have another pair ready, so that a change needs no download and no build:
# keep_ready:
#   - {model: MODEL, profile: ANOTHER}

# Who may reach the server: loopback (ssh tunnel), docker, tailscale or lan. It asks for a key.
# serve: {expose: lan, port: 8000}
# paths: {models_dir: /data/models}
# Every setting with its default: `spark-deploy settings`.
"""
_PLAIN = "plain"  # how repositories are served as they were published
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
    """Write missing files and renew schemas; keep everything else."""
    folder = Path(directory)
    hosts = _entries(host, user) if host else _hosts_here(folder, local)
    texts = {
        Path(HOSTS_FILE): HOSTS_HEAD + "".join(hosts),
        Path("group_vars/all.yml"): _settings(options.model, options.profile),
        INVENTORY: INVENTORY_TEXT,
        Path("config.py"): CONFIG_TEXT,
        Path(".gitignore"): IGNORED,
    }
    written = [folder / name for name, text in texts.items() if _write(folder / name, text)]
    try:
        read_hosts(folder / HOSTS_FILE)
        here = read_inventory(folder / INVENTORY)
    except SparkError:
        for path in written:  # else the next try would keep the mistake
            path.unlink()
            if path.parent != folder:
                with suppress(OSError):  # other files lie there
                    path.parent.rmdir()
        raise
    paths = [Path(f"schema/{name}.schema.json") for name in SCHEMAS]
    schemas = {path: (CHECKOUT / path).read_text("utf-8") for path in paths}
    texts |= schemas
    written += [
        folder / name for name, text in schemas.items() if _write(folder / name, text, renew=True)
    ]
    kept = [folder / name for name in texts if folder / name not in written]
    for name in texts:
        note(f"{'kept' if folder / name in kept else 'written':<8} {folder / name}")
    open_names = _lock(folder)
    command = f"{_into(folder)}{shlex.quote(command_path('spark-deploy'))} up"
    found = {
        "folder": str(folder), "written": [str(path) for path in written],
        "kept": [str(path) for path in kept], "hosts": list(_served(here)),
        "not_locked": open_names, "next": [command],
    }  # fmt: skip
    before = "      (before that, if you like: `spark-deploy plan`, `spark-deploy doctor`)"
    print_result(options, found, [[f"next: {command}", before]])
    return 0


def _served(hosts: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield what each host of the folder is to serve."""
    for name, data in hosts.items():
        settings = data[KEY].found.settings
        yield {"host": name, "model": settings.model, "profile": settings.profile}


def _hosts_here(folder: Path, local: bool) -> list[str]:
    """Return the hosts of a list that is there, of this machine, or as a person says."""
    if (folder / HOSTS_FILE).exists():
        return []
    here = is_spark()
    if local or (here and not sys.stdin.isatty()):
        return _entries([LOCAL], None)
    if not sys.stdin.isatty():
        fix = "name them: `spark-deploy init DIR --host spark-1=192.168.1.21 --user nvidia`"
        raise SparkError.one("hosts", "none is named and nobody is there to ask", fix)
    if here and click.confirm("This machine is a Spark. Serve on it?", default=True, err=True):
        return _entries([LOCAL], None)
    said = click.prompt("Your Spark's name or address (several: with blanks between)", err=True)
    user = click.prompt("Login user (empty: as ssh does)", default="", show_default=False, err=True)
    return _entries(re.findall(r"[^\s,]+", said), user or None)


def is_spark() -> bool:
    """Tell whether this machine says it is a DGX Spark."""
    try:
        return "spark" in PRODUCT_NAME.read_text("utf-8").lower()
    except OSError:
        return False


def _entries(named: Sequence[str], user: str | None) -> list[str]:
    """Return the lines of hosts.yml for ``NAME`` or ``NAME=ADDRESS`` or ``USER@ADDRESS``."""
    lines = []
    for number, one in enumerate(named, start=1):
        name, _, address = one.partition("=")
        login = user
        if not name.startswith("@") and "@" in name + address:
            login, _, rest = (address or name).partition("@")
            name, address = (name, rest) if address else (rest, "")
        if re.fullmatch(r"[\d.]+|.*:.*", name):  # an address makes a poor name
            name, address = f"spark-{number}", name
        said = {"address": address, "user": login if name != LOCAL else None}
        keys = ", ".join(f"{key}: {value}" for key, value in said.items() if value)
        quoted = f'"{name}"' if name.startswith("@") else name
        lines.append(f"  {quoted}: {{{keys}}}\n" if keys else f"  {quoted}:\n")
    return lines


def _settings(model: str | None, profile: str | None) -> str:
    catalog, model = read_catalog(), model or Settings().model
    # Some stages of the ladder are there to be compared, and say so.
    known = [
        name
        for (name, of), one in catalog.profiles.items()
        if of == model and not one.choose_when.startswith("you compare")
    ]
    served = [name for name in known if _is_served(model, name, catalog)]
    default = Settings().profile
    if default in served:
        served = [name for name in served if name != _PLAIN]  # that of models that are not ours
    elif _PLAIN in served:
        default = _PLAIN
    profile = profile or default
    others = [name for name in served if name != profile]
    said = {
        "MODEL": model,
        "PROFILE": profile,
        "OTHERS": f"or {', '.join(others)}: {page('profiles')}" if others else "",
        "ANOTHER": next(iter(others), profile),
    }
    return re.sub("|".join(said), lambda found: said[found[0]], SETTINGS_TEXT)


def _is_served(model: str, profile: str, catalog: Catalog) -> bool:
    """Whether a pair may be chosen on a host by itself."""
    try:
        resolve(replace(Settings(), model=model, profile=profile), catalog)
    except SparkError:
        return False
    return True


def _write(path: Path, text: str, *, renew: bool = False) -> bool:
    """Write a file that is not there yet, or not as it is to be; tell whether that was so."""
    if path.exists() and not (renew and path.read_bytes() != text.encode()):
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "name a folder that may be written"
        raise SparkError.one(str(path), f"cannot be written: {error.strerror}", fix) from error
    return True


def _lock(folder: Path) -> str | None:
    """Lock the names in use, where hub and registry answer, else return why they are not.

    A deploy does it otherwise.
    """
    try:
        update.lock(Options(inventory=str(folder / INVENTORY)), update.Choice(missing=True))
    except SparkError as error:
        why = error.problems[0].what
        note(f"not locked yet: {why}; `up` looks names up when it needs them")
        return why
    return None


def _into(folder: Path) -> str:
    return "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
