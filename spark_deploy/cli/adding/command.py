"""``spark-deploy add``: one command from a repository, or a recipe of others, to a catalog file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spark_deploy.catalog.beside import is_repository
from spark_deploy.catalog.engines import Engine
from spark_deploy.catalog.load import read_families
from spark_deploy.cli.adding.draft import Draft
from spark_deploy.cli.adding.recipes import draft_of_recipe
from spark_deploy.cli.adding.repository import Card, draft_of
from spark_deploy.cli.adding.shared import read
from spark_deploy.cli.adding.take import take, write_files
from spark_deploy.cli.changes import use
from spark_deploy.cli.hosts import Listed, again, answer, listed, planned, say
from spark_deploy.cli.planned.parts import lines
from spark_deploy.cli.taken import Options
from spark_deploy.documents.files import read_mapping
from spark_deploy.documents.shown import one_line
from spark_deploy.errors import CatalogError, SparkError
from spark_deploy.lockfile.anatomy import anatomy_of, ask_hub
from spark_deploy.lockfile.hub import card_of
from spark_deploy.lockfile.hub_token import read_hub_token
from spark_deploy.planning.resolve import pair_of

_PROFILE = "plain"


@dataclass(frozen=True, slots=True)
class _Added:
    """A pair that is in the catalog now."""

    model: str
    profile: str
    repository: str
    files: list[Path]
    open: list[str]  # what is not known of it, or was not used


def run(options: Options) -> int:
    """Write the file, check it as every file is, and print its plan and what is open."""
    # For the new model; what hosts serve now need not go with it, nor be possible at all.
    profile, options.profile = options.profile or _PROFILE, None
    # Hosts of an inventory may differ in hub and folder: the first one's count.
    host = listed(options, judged=False)[0]
    added = _added(options, host, profile)
    pair = f"{added.model}/{added.profile}"
    found: dict[str, Any] = {
        "files": [str(file) for file in added.files], "model": added.model,
        "profile": added.profile, "repository": added.repository, "release": None,
        "fetched_bytes": None, "image_bytes": None, "open": added.open,
        "unproven": f"nobody here ran {added.repository}; the first deploy asks it and says so",
        "chosen": [], "next": [again(options, "use", pair), again(options, "up")], "problems": [],
    }  # fmt: skip
    text: list[str] = []
    try:
        text += _planned(options, added, found)
        if options.use:
            text += _chosen(options, pair, found)
        else:
            text.append(f"  NEXT        {'; then '.join(found['next'])}")
    except SparkError as error:
        found["problems"] = [asdict(problem) for problem in error.problems]
        for problem in error.problems:
            say(str(problem))
        if not text:
            found["next"] = []
            say("the file stays: change it, then look with `spark-deploy plan`")
    if text or options.json:
        answer(options, found, [text])
    return 1 if found["problems"] else 0


def _added(options: Options, host: Listed, profile: str) -> _Added:
    """Write what a shared file, a recipe or a repository says."""
    data = _file(options.place)
    if data is not None and "shared" in data:
        shared = read(data, options.place)
        files, left_open = take(shared, host, force=options.force)
        name, profile = shared.name, shared.profile_name
        return _Added(name, profile, shared.model_repository, files, left_open)
    draft = (
        draft_of_recipe(data, Path(options.place).name, _engine(host))
        if data is not None
        else _of_repository(options.place, host)
    )
    texts = {("models", draft.name): draft.text()}
    files = write_files(host.settings.root, texts, force=options.force)
    return _Added(draft.name, profile, draft.repository, files, draft.open)


def _planned(options: Options, added: _Added, found: dict[str, Any]) -> list[str]:
    """Note and return the plan of the new pair, and what is open of it."""
    after = listed(options, judged=False)[0].serving(added.model, added.profile)
    plan = planned(after)
    found["release"] = plan.serve.name
    found["fetched_bytes"] = sum(source.size_bytes for source in plan.sources)
    found["image_bytes"] = plan.image.size_bytes
    return [
        *lines(plan, *pair_of(after.settings.settings, after.catalog)),
        *(f"  OPEN        {one_line(what)}" for what in added.open),
        f"  UNPROVEN    {found['unproven']}",
    ]


def _chosen(options: Options, pair: str, found: dict[str, Any]) -> list[str]:
    """Choose the new pair where the owner's files do; note and return what changed."""
    edits, hosts = use.choose(Options(**{**vars(options), "choice": pair, "dry": False}))
    found["chosen"], found["next"] = use.as_json(edits), [again(options, "up", *hosts)]
    return [*map(use.line_of, edits), f"  NEXT        {found['next'][0]}"]


def _file(place: str) -> dict[str, Any] | None:
    """Return what a file of this machine says; ``None``: it is none."""
    path = Path(place)
    if not path.is_file():
        return None
    data, problems = read_mapping(path, shown=path.name, of_others=True)
    if problems:
        raise CatalogError(problems)
    return data


def _engine(host: Listed) -> Engine | None:
    """Return what is known of the engine that the new model would have."""
    return host.catalog.engines.of_image(host.settings.settings.images["engine"])[1]


def _of_repository(place: str, host: Listed) -> Draft:
    """Return the file of ``ORG/NAME[@REVISION]``."""
    repository, _, asked = place.partition("@")
    if not is_repository(repository):
        what = "is neither a file nor ORG/NAME[@REVISION]"
        raise CatalogError.one(place, what, "check the spelling")
    hub = host.settings.settings.hub
    found = ask_hub(f"{repository}@{asked or 'main'}", hub, all_documents=True)
    token = read_hub_token(hub)
    card = Card(*card_of(hub.endpoint, repository, found.commit, token))
    anatomy = anatomy_of(repository, found)
    return draft_of(anatomy, found, card, host.catalog.engines, read_families(), asked or "main")
