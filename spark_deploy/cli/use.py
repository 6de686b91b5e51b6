"""``spark-deploy use``: select a model or profile in settings files."""

from __future__ import annotations

import json
from dataclasses import replace

import click

from spark_deploy.cli.console import Options, name_completer, next_command, note, shared_options
from spark_deploy.cli.hosts import select_hosts
from spark_deploy.cli.models import HOST_COUNTS, PLAIN_PROFILE, fitting_profiles
from spark_deploy.cli.settings import Edit, print_edits, write_values
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.errors import SparkError
from spark_deploy.config.schema_errors import closest


@click.command
@click.argument(
    "choice",
    metavar="MODEL|PROFILE|MODEL/PROFILE",
    shell_complete=name_completer("models", "profiles"),
)
@click.option("--dry", is_flag=True, help="Show the changes without making them.")
@shared_options()
def use(options: Options, choice: str) -> int:
    edits, hosts = select(options, choice)
    print_edits(options, edits, hosts)
    overrides = _overrides(options) if edits else {}
    if overrides:
        values = ", ".join(f"{key}: {value}" for key, value in overrides.items())
        drop = [f"{key}={{}}" if value.startswith("{") else f"{key}=null"
                for key, value in overrides.items()]  # fmt: skip
        note(f"these settings still override the profile: {values}")
        note(f"  to drop them: {next_command(options, 'set', *drop)}")
    return 0


def _overrides(options: Options) -> dict[str, str]:
    """Return the engine settings of the chosen hosts, which apply to every profile."""
    return {
        f"engine.{key}": json.dumps(value)
        for host in select_hosts(options, must_serve=False)
        for key, value in host.settings.data.get("engine", {}).items()
        if value not in (None, {})
    }


def select(options: Options, choice: str) -> tuple[list[Edit], list[str]]:
    """Write the choice; return changed lines and host names. Refuses an impossible choice."""
    # The current choice may be impossible to serve.
    chosen = select_hosts(options, must_serve=False)
    all_hosts = select_hosts(replace(options, limit=[], exclude=[]), must_serve=False)
    catalog = chosen[0].catalog
    wanted = _parse_choice(choice, catalog)
    if wanted.keys() == {"model"}:
        # Change the profile only if it cannot serve the model, or is `plain` for another model.
        model, ranks = wanted["model"], chosen[0].settings.settings.ranks
        by_count = (fitting_profiles(model, catalog, count) for count in (ranks, *HOST_COUNTS))
        fitting = next((names for names in by_count if names), [])
        present = {(host.settings.settings.model, host.settings.settings.profile)
                   for host in chosen}  # fmt: skip
        replaced = any(
            profile not in fitting or (profile == PLAIN_PROFILE and current != model)
            for current, profile in present
        )
        if fitting and replaced:
            wanted["profile"] = fitting[0]
        kept = ", ".join(sorted({profile for _, profile in present}))
        is_new = "profile" in wanted and kept != wanted["profile"]
        note(f"chose profile {wanted['profile']}" if is_new else f"kept profile {kept}")
    edits = write_values(chosen, all_hosts, wanted, dry=options.dry, shown=f"use {choice}")
    return edits, sorted(host.name for host in chosen)


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
    listed = [name for name in models if not name.startswith("lab-")]
    guess = closest(unknown, [*listed, *profiles])
    names = f"models: {', '.join(listed)}; profiles: {', '.join(profiles)}"
    fix = f"did you mean {guess}?" if guess else f"choose from {names}"
    raise SparkError.one(f"use {choice}", f"'{unknown}' is not in the catalog", fix)
