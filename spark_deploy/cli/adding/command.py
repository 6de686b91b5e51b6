"""``spark-deploy add``: one command from a repository, or a recipe of others, to a catalog file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spark_deploy.catalog.beside import HUB_REPOSITORY
from spark_deploy.catalog.load import read_families
from spark_deploy.cli.adding.draft import Draft
from spark_deploy.cli.adding.recipes import draft_of_recipe
from spark_deploy.cli.adding.repository import Card, draft_of
from spark_deploy.cli.adding.shared import is_shared, read
from spark_deploy.cli.adding.take import take, write_files
from spark_deploy.cli.changes import use
from spark_deploy.cli.commands import Options
from spark_deploy.cli.hosts import Listed, listed, planned, say
from spark_deploy.cli.planned.parts import lines
from spark_deploy.documents.files import read_mapping
from spark_deploy.errors import CatalogError, SparkError
from spark_deploy.lockfile.anatomy import anatomy_of, ask_hub
from spark_deploy.lockfile.hub import card_of
from spark_deploy.planning.resolve import pair_of
from spark_deploy.settings.read_secret import read_secret

_PROFILE = "plain"


def run(options: Options) -> int:
    """Write the file, check it as every file is, and print its plan and what is open."""
    # For the new model; what hosts serve now need not go with it, nor be possible at all.
    profile, options.profile = options.profile or _PROFILE, None
    # Hosts of an inventory may differ in hub and folder: the first one's count.
    host = listed(options, judged=False)[0]
    data = _file(options.place)
    if data is not None and is_shared(data):
        shared = read(data, options.place)
        taken = take(shared, host, force=options.force)
        return _planned(options, shared.name, shared.profile_name, taken, shared.model_repository)
    draft = (
        draft_of_recipe(data, Path(options.place).name)
        if data is not None
        else _of_repository(options.place, host)
    )
    write_files(host.settings.root, {("models", draft.name): draft.text()}, force=options.force)
    return _planned(options, draft.name, profile, draft.open, draft.repository)


def _planned(
    options: Options, model: str, profile: str, still_open: Iterable[str], repository: str
) -> int:
    """Print the plan of the new file and what is open."""
    try:
        after = listed(options, judged=False)[0].serving(model, profile)
        plan = planned(after)
        print("\n".join(lines(plan, *pair_of(after.settings.settings, after.catalog))))
    except SparkError as error:
        for problem in error.problems:
            say(str(problem))
        say("the file stays: change it, then look with `spark-deploy plan`")
        return 1
    for what in still_open:
        print(f"  OPEN        {what}")
    print(f"  UNPROVEN    nobody here ran {repository}; the first deploy asks it and says so")
    if options.use:
        chosen = {"choice": f"{model}/{profile}", "dry": False, "json": False}
        return use.run(Options(**{**vars(options), **chosen}))
    print(f"  NEXT        spark-deploy use {model}/{profile}; then spark-deploy up")
    return 0


def _file(place: str) -> dict[str, Any] | None:
    """Return what a file of this machine says; ``None``: it is none."""
    path = Path(place)
    if not path.is_file():
        return None
    data, problems = read_mapping(path, shown=path.name)
    if problems:
        raise CatalogError(problems)
    return data


def _of_repository(place: str, host: Listed) -> Draft:
    """Return the file of ``ORG/NAME[@REVISION]``."""
    repository, _, asked = place.partition("@")
    if not re.match(HUB_REPOSITORY["pattern"], repository):
        what = "is neither a file nor ORG/NAME[@REVISION]"
        raise CatalogError.one(place, what, "check the spelling")
    hub = host.settings.settings.hub
    found = ask_hub(f"{repository}@{asked or 'main'}", hub, all_documents=True)
    token = read_secret(hub.token, setting="hub.token") if hub.token else None
    card = Card(*card_of(hub.endpoint, repository, found.commit, token))
    anatomy = anatomy_of(repository, found)
    return draft_of(anatomy, found, card, host.catalog.engines, read_families(), asked or "main")
