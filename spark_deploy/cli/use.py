"""``spark-deploy use``: select a model or profile in settings files."""

import json
from dataclasses import replace

import click

from spark_deploy.cli.console import Options, name_completer, next_command, note, shared_options
from spark_deploy.cli.hosts import Target, select_hosts
from spark_deploy.cli.models import HOST_COUNTS, PLAIN_PROFILE, find_fitting_profiles
from spark_deploy.cli.settings import Edit, print_edits, write_values
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import SparkError
from spark_deploy.config.schema_errors import suggest


@click.command
@click.argument(
    "choice",
    metavar="MODEL|PROFILE|MODEL/PROFILE",
    shell_complete=name_completer("models", "profiles"),
)
@click.option("--dry", is_flag=True, help="Show the changes without making them.")
@shared_options()
def use(options: Options, choice: str) -> int:
    edits, hosts = apply_choice(options, choice)
    print_edits(options, edits, hosts)
    overrides = _overrides(options) if edits else {}
    if overrides:
        values = ", ".join(f"{key}: {value}" for key, value in overrides.items())
        unset = [f"{key}={{}}" if value.startswith("{") else f"{key}=null"
                 for key, value in overrides.items()]  # fmt: skip
        note(f"these settings still override the profile: {values}")
        note(f"  to remove them, run `{next_command(options, 'set', *unset)}`")
    return 0


def _overrides(options: Options) -> dict[str, str]:
    """Return engine settings on the selected hosts, which override every profile, as JSON."""
    return {
        f"engine.{key}": json.dumps(value)
        for host in select_hosts(options, must_serve=False)
        for key, value in host.loaded.data.get("engine", {}).items()
        if value not in (None, {})
    }


def apply_choice(options: Options, choice: str) -> tuple[list[Edit], list[str]]:
    """Write the choice to settings files; return edits and host names. Reject an invalid choice."""
    # The current settings may be impossible to serve; the new choice may correct them.
    selected = select_hosts(options, must_serve=False)
    all_hosts = select_hosts(replace(options, limit=[], exclude=[]), must_serve=False)
    values = _parse_choice(choice, selected[0].catalog)
    if values.keys() == {"model"}:
        values |= _choose_profile(values["model"], selected)
    edits = write_values(selected, all_hosts, values, dry=options.dry, label=f"use {choice}")
    return edits, sorted(host.name for host in selected)


def _choose_profile(model: str, hosts: list[Target]) -> dict[str, str]:
    """Return another profile if the current profile cannot serve the model, or is `plain`.

    The model may have better profiles than `plain`.
    """
    catalog, ranks = hosts[0].catalog, hosts[0].settings.ranks
    by_count = (find_fitting_profiles(model, catalog, count) for count in (ranks, *HOST_COUNTS))
    fitting = next(filter(None, by_count), [])
    current = {(host.settings.model, host.settings.profile) for host in hosts}
    profiles = ", ".join(sorted({profile for _, profile in current}))
    is_unfit = any(
        profile not in fitting or (profile == PLAIN_PROFILE and current_model != model)
        for current_model, profile in current
    )
    if fitting and is_unfit:
        note(f"{'kept' if fitting[0] == profiles else 'chose'} profile {fitting[0]}")
        return {"profile": fitting[0]}
    note(f"kept profile {profiles}")
    return {}


def _parse_choice(choice: str, catalog: Catalog) -> dict[str, str]:
    models, profiles = sorted(catalog.models), sorted(set(catalog.profile_names))
    model, slash, profile = choice.partition("/")
    if slash and model in models and profile in profiles:
        return {"model": model, "profile": profile}
    if not slash and choice in models:
        return {"model": choice}
    if not slash and choice in profiles:
        return {"profile": choice}
    unknown = profile if slash and model in models else model
    shipped = [name for name in models if not name.startswith("lab-")]
    names = f"models: {', '.join(shipped)}; profiles: {', '.join(profiles)}"
    fix = suggest(unknown, [*shipped, *profiles], f"choose from {names}")
    raise SparkError.one(f"use {choice}", f"the catalog does not contain '{unknown}'", fix)
