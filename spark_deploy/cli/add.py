"""``spark-deploy add``: one command from a repository, or a recipe of others, to a catalog file."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from spark_contract.orders import CONFIG, GENERATION, TOKENIZER, Described

from spark_deploy.cli import repository, run_pyinfra, use
from spark_deploy.cli.draft import Draft
from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.install_shared import take, write_files
from spark_deploy.cli.options import FILE, Options, host_names, profile_option, shared_options
from spark_deploy.cli.plan_text import plan_lines
from spark_deploy.cli.recipes import draft_of_recipe
from spark_deploy.cli.share import read
from spark_deploy.cli.terminal import next_command, note, print_result
from spark_deploy.config.catalog.anatomy import Anatomy
from spark_deploy.config.catalog.companions import is_repository
from spark_deploy.config.catalog.load import read_families
from spark_deploy.config.catalog.types import Engine, Engines, Families
from spark_deploy.config.documents.shown import one_line
from spark_deploy.config.documents.yaml_files import read_mapping
from spark_deploy.config.errors import CatalogError, SparkError
from spark_deploy.lock.anatomy import anatomy_of, ask_hub
from spark_deploy.lock.hub import card_of
from spark_deploy.lock.hub_token import read_hub_token
from spark_deploy.plan.resolve import pair_of

# Other formats of the same weights, which the engine does not read.
_OTHER_FORMATS = ("original/*", "metal/*", "onnx/*", "openvino/*", "*.gguf", "consolidated*")
_MOST_BYTES = 1 << 50  # no file is larger
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Card:
    """What the hub says of a repository beside its files."""

    license: str = ""
    gated: bool = False
    task: str = ""  # the hub's word: text-generation, sentence-similarity, ...


def draft_of(
    anatomy: Anatomy, found: Described, card: Card, engines: Engines, families: Families, asked: str
) -> Draft:
    """Return the file of a repository; ``asked`` is the revision that somebody named."""
    draft = Draft(anatomy.repository, anatomy.commit)
    draft.about = list(_about(anatomy, found, card, asked))
    task = task_of(anatomy, found, card, engines)
    if task != "chat":
        draft.put("task", task, _WHY_TASK[task])
    if anatomy.vision_bytes and anatomy.architecture.endswith("ForConditionalGeneration"):
        draft.put("vision", True, "It has a tower for pictures; `engine.vision: on` uses it.")
    if isinstance(found.documents.get(CONFIG, {}).get("audio_config"), dict):
        draft.put(
            "audio", True, "config.json describes a tower for sounds; the proof asks with two."
        )
    patterns = [
        one for one in _OTHER_FORMATS
        if any(fnmatch.fnmatchcase(path, one) for path in found.files)
    ]  # fmt: skip
    if patterns and any(path.startswith("model") for path in found.files):
        draft.put("leave_out", patterns, "The same weights in other formats; not fetched.")
    if task == "chat":
        _parsers(draft, anatomy, families)
    draft.open += list(_open(anatomy, found))
    return draft


def _parsers(draft: Draft, anatomy: Anatomy, families: Families) -> None:
    family = families.of(anatomy.model_type, anatomy.repository)
    if family is None:
        said = anatomy.model_type or "no model_type"
        draft.open.append(f"parsers: none is known for {said}; tool calls and thinking stay text")
        return
    parsers = {"reasoning": family.reasoning, "tool_call": family.tool_call}
    draft.put("parsers", {k: v for k, v in parsers.items() if v}, f"From {family.source}.")
    checks = {"tool_call": bool(family.tool_call), "reasoning": bool(family.reasoning)}
    draft.put(
        "check",
        {**{k: True for k, on in checks.items() if on}, "conversation": True},
        "Asked beside the questions that any instruct model answers.",
    )


_WHY_TASK = {
    "completion": "Without a chat template it goes on with texts; there is no chat.",
    "embedding": "The repository or the hub calls it a model for embeddings.",
    "reranking": "The repository or the hub calls it a model that ranks documents.",
    "classification": "The hub calls it a model that sorts texts into classes.",
}


def task_of(anatomy: Anatomy, found: Described, card: Card, engines: Engines) -> str:
    """Return what a repository is for, by its files first."""
    name = anatomy.repository.lower()
    if card.task == "text-ranking" or "rerank" in name:
        return "reranking"
    if card.task in ("text-classification", "zero-shot-classification"):
        return "classification"
    embeds = card.task in ("sentence-similarity", "feature-extraction")
    if embeds or "modules.json" in found.files or "embedding" in name:
        return "embedding"
    named = anatomy.architecture
    if any(named in one.pools and named not in one.generates for one in engines.engines.values()):
        return "embedding"
    template = found.documents.get(TOKENIZER, {}).get("chat_template")
    has_file = any(path.startswith("chat_template.") for path in found.files)
    return "chat" if template or has_file else "completion"


def _about(anatomy: Anatomy, found: Described, card: Card, asked: str) -> Iterator[str]:
    total = sum(size for size in found.files.values() if size and 0 < size < _MOST_BYTES)
    yield (
        f"Written by `spark-deploy add` from {anatomy.repository} at {asked}, which was commit "
        f"{anatomy.commit[:12]}. Nobody proved it yet: a deploy does."
    )
    yield f"licence: {card.license or 'the hub names none'}" + (", gated" if card.gated else "")
    yield (
        f"architecture: {anatomy.architecture or 'not named'}, weights "
        f"{anatomy.quantisation or 'not quantised'}; {total / 1e9:.1f} GB of files, "
        f"{anatomy.weights_bytes / 1e9:.1f} GB of weights always loaded, "
        f"{anatomy.vision_bytes / 1e9:.1f} GB for pictures or sound, "
        f"{anatomy.drafter_bytes / 1e9:.1f} GB of a drafter of its own"
    )
    if anatomy.context_tokens:
        yield f"context: {anatomy.context_tokens:,} tokens"
    sampling = found.documents.get(GENERATION, {})
    numbers = {key: sampling.get(key) for key in _SAMPLING}
    said = [f"{key} {value}" for key, value in numbers.items() if _is_small(value)]
    if said:
        yield f"sampling that its publisher advises (the engine takes it): {', '.join(said)}"


def _is_small(value: object) -> bool:
    """Whether it is a number that somebody could mean; not true, infinite or half a page long."""
    return type(value) in (int, float) and abs(value) < 10**6  # type: ignore[arg-type]


def _open(anatomy: Anatomy, found: Described) -> Iterator[str]:
    if anatomy.cache_unknown:
        yield f"KV cache of a token: {anatomy.cache_unknown}; pin engine.kv_cache_gib to be sure"
    if anatomy.drafter_bytes:
        yield "speculation: it has a drafter of its own; how many drafts pay is for you to measure"
    if found.documents.get("config.json", {}).get("auto_map"):
        yield "config.json names code of its own; it is not fetched, the engine's own class is used"


_PROFILE = "plain"


@dataclass(frozen=True, slots=True)
class _Added:
    """A pair that is in the catalog now."""

    model: str
    profile: str
    repository: str
    files: list[Path]
    open: list[str]  # what is not known of it, or was not used


@click.command
@click.argument("place", metavar="ORG/NAME[@REVISION]|FILE|MODEL", type=FILE)
@profile_option("Profile to use [plain].")
@click.option("--use", "is_chosen", is_flag=True, help="Also select it in your settings files.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--requantize", is_flag=True, help="Build an INT4 checkpoint of MODEL (AutoRound).")
@click.option(
    "--on", multiple=True, metavar="NAME", shell_complete=host_names, help="Host for AutoRound."
)
@shared_options(changes=True)
def add(
    options: Options, place: str, is_chosen: bool, force: bool, requantize: bool, on: Sequence[str]
) -> int:
    """Write the catalog file, validate it, print its plan and what is open."""
    if requantize:
        return _requantize(options, place, on)
    # The present choice of the hosts need not fit the new model, nor be possible at all.
    profile, options = options.profile or _PROFILE, replace(options, profile=None)
    # Hosts of an inventory may differ in hub and folder: the first host decides.
    host = select_hosts(options, judged=False)[0]
    if options.dry:
        return _preview(options, place, host)
    added = _added(place, host, profile, force=force)
    pair = f"{added.model}/{added.profile}"
    found: dict[str, Any] = {
        "files": [str(file) for file in added.files], "model": added.model,
        "profile": added.profile, "repository": added.repository, "release": None,
        "fetched_bytes": None, "image_bytes": None, "open": added.open,
        "unproven": f"nobody here ran {added.repository}; the first deploy asks it and says so",
        "chosen": [], "problems": [],
        "next": [next_command(options, "use", pair), next_command(options, "up")],
    }  # fmt: skip
    text: list[str] = []
    try:
        text += _planned(options, added, found)
        if is_chosen:
            text += _chosen(options, pair, found)
        else:
            text.append(f"  NEXT        {'; then '.join(found['next'])}")
    except SparkError as error:
        found["problems"] = [asdict(problem) for problem in error.problems]
        for problem in error.problems:
            note(str(problem))
        if not text:
            found["next"] = []
            note("the file stays: change it, then look with `spark-deploy plan`")
    if text or options.json:
        print_result(options, found, [text])
    return 1 if found["problems"] else 0


def _requantize(options: Options, model: str, hosts: Sequence[str]) -> int:
    """Run the AutoRound job of a catalog model on a host."""
    options = replace(options, model=model, profile=None, limit=[*options.limit, *hosts])
    code = run_pyinfra.run("requantize", options, {"checkpoint.requantized": True})
    if code == 0 and not options.dry:
        note(
            f"to serve it, set checkpoint.requantized: true next to model: {model}, "
            "then run spark-deploy up"
        )
    return code


def _preview(options: Options, place: str, host: Target) -> int:
    """Print what a file would add, or what a repository holds; write nothing."""
    data = _file(place)
    if data is None:
        return repository.inspect(place, host, as_json=options.json)
    if "shared" in data:
        shared = read(data, place)
        files = {"models": shared.name, "profiles": shared.profile_name}
        lines_ = [f"catalog/{kind}/{name}.yml" for kind, name in files.items()]
        lines_ += [f"{repo} at {one.commit}" for repo, one in shared.sources.items()]
        print_result(options, {"would_write": lines_}, [lines_])
    else:
        draft = draft_of_recipe(data, Path(place).name, _engine(host))
        print_result(
            options, {"model": draft.name, "open": draft.open}, [draft.text().splitlines()]
        )
    return 0


def _added(place: str, host: Target, profile: str, *, force: bool) -> _Added:
    """Write what a shared file, a recipe or a repository says."""
    data = _file(place)
    if data is not None and "shared" in data:
        shared = read(data, place)
        files, left_open = take(shared, host, force=force)
        name, profile = shared.name, shared.profile_name
        return _Added(name, profile, shared.model_repository, files, left_open)
    draft = (
        draft_of_recipe(data, Path(place).name, _engine(host))
        if data is not None
        else _of_repository(place, host)
    )
    texts = {("models", draft.name): draft.text()}
    files = write_files(host.settings.root, texts, force=force)
    return _Added(draft.name, profile, draft.repository, files, draft.open)


def _planned(options: Options, added: _Added, found: dict[str, Any]) -> list[str]:
    """Note and return the plan of the new pair, and what is open of it."""
    after = select_hosts(options, judged=False)[0].serving(added.model, added.profile)
    plan = build_plan(after)
    found["release"] = plan.serve.name
    found["fetched_bytes"] = sum(source.size_bytes for source in plan.sources)
    found["image_bytes"] = plan.image.size_bytes
    return [
        *plan_lines(plan, *pair_of(after.settings.settings, after.catalog)),
        *(f"  OPEN        {one_line(what)}" for what in added.open),
        f"  UNPROVEN    {found['unproven']}",
    ]


def _chosen(options: Options, pair: str, found: dict[str, Any]) -> list[str]:
    """Choose the new pair where the owner's files do; note and return what changed."""
    edits, hosts = use.choose(replace(options, dry=False), pair)
    found["chosen"], found["next"] = use.as_json(edits), [next_command(options, "up", *hosts)]
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


def _engine(host: Target) -> Engine | None:
    """Return what is known of the engine that the new model would have."""
    return host.catalog.engines.of_image(host.settings.settings.images["engine"])[1]


def _of_repository(place: str, host: Target) -> Draft:
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
