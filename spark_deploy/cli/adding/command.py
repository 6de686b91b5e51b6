"""``spark-deploy add``: one command from a repository, or a recipe of others, to a catalog file."""

from __future__ import annotations

import re
from pathlib import Path

from spark_deploy.catalog.load import read_catalog, read_families
from spark_deploy.catalog.model import HUB_REPOSITORY
from spark_deploy.checkout import catalog_files
from spark_deploy.cli.adding.draft import Draft
from spark_deploy.cli.adding.recipes import draft_of_recipe
from spark_deploy.cli.adding.repository import Card, draft_of
from spark_deploy.cli.commands import Options
from spark_deploy.cli.hosts import Listed, listed, planned, say
from spark_deploy.cli.plan import lines
from spark_deploy.documents.files import read_mapping
from spark_deploy.errors import CatalogError, SparkError
from spark_deploy.lockfile.anatomy import anatomy_of, ask_hub
from spark_deploy.lockfile.hub import card_of
from spark_deploy.planning.resolve import pair_of
from spark_deploy.settings.read_secret import read_secret

_PROFILE = "plain"


def run(options: Options) -> int:
    """Write the file, check it as every file is, and print its plan and what is open."""
    # For the new model; what hosts serve now is looked at as it is.
    profile, options.profile = options.profile or _PROFILE, None
    # Hosts of an inventory may differ in hub and folder: the first one's count.
    host = listed(options)[0]
    draft = _draft(options.place, host)
    path = _write(draft, host.settings.root, force=options.force)
    say(f"{path}: written")
    options.model, options.profile = draft.name, profile
    try:
        after = listed(options)[0]
        plan = planned(after)
        print("\n".join(lines(plan, *pair_of(after.settings.settings, after.catalog))))
    except SparkError as error:
        for problem in error.problems:
            say(str(problem))
        say("the file stays: change it, then look with `spark-deploy plan`")
        return 1
    for what in draft.open:
        print(f"  OPEN        {what}")
    print(f"  UNPROVEN    nobody here ran {draft.repository}; the first deploy asks it and says so")
    print(f"  NEXT        model: {draft.name}, profile: {options.profile} in group_vars; deploy")
    return 0


def _draft(place: str, host: Listed) -> Draft:
    """Return the file of a recipe that is on this machine, or of a repository."""
    path = Path(place)
    if not path.is_file():
        return _of_repository(place, host)
    data, problems = read_mapping(path, shown=path.name)
    if problems:
        raise CatalogError(problems)
    return draft_of_recipe(data, path.name)


def _of_repository(place: str, host: Listed) -> Draft:
    """Return the file of ``ORG/NAME[@REVISION]``."""
    repository, _, asked = place.partition("@")
    if not re.match(HUB_REPOSITORY, repository):
        what = "is neither a file nor ORG/NAME[@REVISION]"
        raise CatalogError.one(place, what, "check the spelling")
    hub = host.settings.settings.hub
    found = ask_hub(f"{repository}@{asked or 'main'}", hub, all_documents=True)
    token = read_secret(hub.token, setting="hub.token") if hub.token else None
    card = Card(*card_of(hub.endpoint, repository, found.commit, token))
    anatomy = anatomy_of(repository, found)
    return draft_of(anatomy, found, card, host.catalog.engines, read_families(), asked or "main")


def _write(draft: Draft, root: Path, *, force: bool) -> Path:
    """Write the file beside the inventory; refuse one that nobody could use, or that is there."""
    path = root / "catalog/models" / f"{draft.name}.yml"
    ours = catalog_files("models").get(draft.name)
    if path.exists() and not force:
        what = "is there already"
        raise CatalogError.one(str(path), what, "remove it, or write over it with --force")
    if ours is not None and ours != path:
        say(f"{draft.name} is a model of ours as well: the new file is used instead of it")
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else None
    path.write_text(draft.text(), encoding="utf-8")
    try:
        read_catalog(own=root).model(draft.name)
    except CatalogError:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
        raise
    return path
