"""``spark-deploy add``: a catalog file from a repository, a shared file or a recipe."""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click
from spark_contract import builder_api
from spark_contract.builder_api import CONFIG, GENERATION, TOKENIZER, RepositoryDescription, Scheme
from spark_contract.documents import to_json

from spark_deploy.cli import changes, share
from spark_deploy.cli.console import (
    FILE,
    Options,
    complete_host_names,
    next_command,
    note,
    print_problem,
    print_result,
    profile_option,
    shared_options,
)
from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.models import Draft, write_files
from spark_deploy.cli.plan_text import plan_lines, row
from spark_deploy.cli.recipes import draft_from_recipe
from spark_deploy.cli.settings import apply_choice, edit_line, edits_data
from spark_deploy.config.catalog.architecture import RepoMetadata
from spark_deploy.config.catalog.load import read_families
from spark_deploy.config.catalog.model import HybridModel
from spark_deploy.config.catalog.profile import is_repository
from spark_deploy.config.catalog.types import Engine, Engines, Families
from spark_deploy.config.checkout import read_mapping
from spark_deploy.config.errors import CatalogError, SparkError, one_line, printable
from spark_deploy.lock.headers import describe_repository, make_metadata, temporary_builder
from spark_deploy.lock.hub import ModelCard, read_model_card
from spark_deploy.lock.resolve import read_hub_token
from spark_deploy.plan.artifacts import tensor_fields
from spark_deploy.plan.resolve import model_and_profile

# Files that contain the same weights in formats that the engine does not read.
_OTHER_FORMATS = ("original/*", "metal/*", "onnx/*", "openvino/*", "*.gguf", "consolidated*")
_MAX_FILE_BYTES = 1 << 50
# URL of a repository page on the hub, with or without a revision.
_PAGE = re.compile(
    r"https?://(?P<hub>[^/]+)/(?P<repository>[^/]+/[^/]+?)(?:/tree/(?P<revision>[^/]+))?/?\Z"
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TASK_COMMENTS = {
    "completion": "The model has no chat template, so it can only continue text.",
    "embedding": "The repository or the hub describes it as an embedding model.",
    "reranking": "The repository or the hub describes it as a model that ranks documents.",
    "classification": "The hub describes it as a text classification model.",
}


@click.command
@click.argument("source", metavar="ORG/NAME[@REVISION]|FILE|MODEL", type=FILE)
@profile_option("Profile to use [plain].")
@click.option("--use", "select", is_flag=True, help="Also select it in your settings files.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option(
    "--requantize", is_flag=True, help="Build an INT4 checkpoint of MODEL with AutoRound."
)
@click.option(
    "--on",
    "hosts",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_host_names,
    help="Run AutoRound on this host.",
)
@shared_options(changes=True)
def add(
    options: Options, source: str, select: bool, force: bool, requantize: bool, hosts: Sequence[str]
) -> int:
    if requantize:
        return _requantize(options, source, hosts)
    profile = options.profile or "plain"
    # --profile applies to the new model, so read the host settings without it.
    options = replace(options, profile=None)
    host = select_hosts(options, must_serve=False)[0]
    hubs = ("huggingface.co", urlsplit(host.settings.hub.endpoint).netloc)
    if (page := _PAGE.match(source)) and page["hub"] in hubs:
        source = f"{page['repository']}@{page['revision'] or 'main'}"
    if options.dry:
        return _preview(options, source, host)
    added = _add_files(source, host, profile, force=force)
    choice = f"{added.model}/{added.profile}"
    data: dict[str, Any] = {
        "files": [str(file) for file in added.files], "model": added.model,
        "profile": added.profile, "repository": added.repository, "release": None,
        "fetched_bytes": None, "image_bytes": None, "open": added.open_questions,
        "unproven": f"{added.repository} has not been tested; the first deploy checks the model",
        "chosen": [], "problems": [],
        "next": [next_command(options, "use", choice), next_command(options, "up")],
    }  # fmt: skip
    lines: list[str] = []
    try:
        lines += _add_plan(options, added, data)
        if select:
            edits, names = apply_choice(options, choice)
            data["chosen"] = edits_data(edits)
            data["next"] = [next_command(options, "up", *names)]
            lines += map(edit_line, edits)
        lines.append(row("NEXT", "; then ".join(data["next"])))
    except SparkError as error:
        data["problems"] = [asdict(problem) for problem in error.problems]
        for problem in error.problems:
            print_problem(problem)
        if not lines:
            data["next"] = []
            note("the model file has been written; edit it, then run `spark-deploy plan`")
    if lines or options.json:
        print_result(options, data, [lines])
    return 1 if data["problems"] else 0


class AddedModel(NamedTuple):
    model: str
    profile: str
    repository: str
    files: list[Path]
    open_questions: list[str]  # unknown facts and unused keys


def _requantize(options: Options, model: str, hosts: Sequence[str]) -> int:
    options = replace(options, model=model, profile=None, limit=[*options.limit, *hosts])
    code = changes.run("requantize", options, {"checkpoint.source": "requantized"})
    if code == 0 and not options.dry:
        note(
            f"to serve it, set `checkpoint.source: requantized` next to `model: {model}`, "
            "then run `spark-deploy up`"
        )
    return code


def _preview(options: Options, source: str, host: Target) -> int:
    """Print what adding a file would write, or what a repository contains."""
    data = _read_file(source)
    if data is None:
        return _inspect(options, source, host)
    if "shared" in data:
        shared = share.read_shared(data, source)
        lines = [f"catalog/models/{shared.name}.yml", f"catalog/profiles/{shared.profile_name}.yml"]
        lines += [f"{repo} at {identity.commit}" for repo, identity in shared.sources.items()]
        print_result(options, {"would_write": lines}, [lines])
    else:
        draft = draft_from_recipe(data, Path(source).name, _selected_engine(host))
        result = {"model": draft.name, "open": draft.open_questions}
        print_result(options, result, [[draft.text().rstrip()]])
    return 0


def _inspect(options: Options, source: str, host: Target) -> int:
    """Print the tensors of a repository or directory, and the models that match them."""
    if Path(source).is_dir():
        source = str(Path(source).absolute())
    elif not is_repository(source.partition("@")[0]):
        problem = "is neither a directory nor ORG/NAME"
        raise CatalogError.single(source, problem, "check the spelling")
    with temporary_builder(host.settings.hub) as builder:
        arguments = [builder_api.JSON] if options.json else []
        for model in host.catalog.models.values():
            if not isinstance(model, HybridModel):
                continue
            for plan in _build_plans(model):
                file_name = f"{model.name}.{plan.shared_experts}.json"
                (builder.folder / file_name).write_text(to_json(plan), encoding="utf-8")
                arguments += [builder_api.AGAINST, file_name]
        print(printable(builder.run(builder_api.INSPECT, *arguments, source)), end="")
    return 0


def _build_plans(model: HybridModel) -> Iterator[builder_api.BuildPlan]:
    """Yield a plan, with placeholder paths, for each scheme that the model has a source for."""
    sources: dict[Scheme, object] = {
        "keep": True, "fp8-base": model.sources.hybrid, "fp8-donor": model.sources.donor,
    }  # fmt: skip
    schemes = [scheme for scheme, source in sources.items() if source]
    for scheme in schemes:
        donor = builder_api.DonorDir("/donor") if scheme in builder_api.WITH_DONOR else None
        yield builder_api.BuildPlan(
            digest="0" * 64, name=model.name, base=builder_api.Base("/base", None), donor=donor,
            **tensor_fields(model), shared_experts=scheme, head="keep", layout="full",
            out=f"/tree/{model.name}", extra={},
        )  # fmt: skip


def _add_files(source: str, host: Target, profile: str, *, force: bool) -> AddedModel:
    """Write catalog files from a shared file, a recipe or a repository."""
    data = _read_file(source)
    if data is not None and "shared" in data:
        shared = share.read_shared(data, source)
        files, questions = share.install(shared, host, force=force)
        repository = str(shared.model.get("repository") or shared.name)
        return AddedModel(shared.name, shared.profile_name, repository, files, questions)
    if data is not None:
        draft = draft_from_recipe(data, Path(source).name, _selected_engine(host))
    else:
        draft = _draft_from_repository(source, host)
    texts = {("models", draft.name): draft.text()}
    files = write_files(host.loaded.root, texts, force=force)
    return AddedModel(draft.name, profile, draft.repository, files, draft.open_questions)


def _add_plan(options: Options, added: AddedModel, data: dict[str, Any]) -> list[str]:
    """Plan the added model; add sizes to ``data`` and return the plan as text."""
    host = select_hosts(options, must_serve=False)[0].with_model(added.model, added.profile)
    plan = build_plan(host)
    data["release"] = plan.release.name
    data["fetched_bytes"] = sum(source.size_bytes for source in plan.sources)
    data["image_bytes"] = plan.image.size_bytes
    return [
        *plan_lines(plan, *model_and_profile(host.settings, host.catalog)),
        *(row("OPEN", one_line(text)) for text in added.open_questions),
        row("UNPROVEN", data["unproven"]),
    ]


def _read_file(source: str) -> dict[str, Any] | None:
    path = Path(source)
    if not path.is_file():
        return None
    data, problems = read_mapping(path, label=path.name, is_foreign=True)
    if problems:
        raise CatalogError(problems)
    return data


def _selected_engine(host: Target) -> Engine | None:
    return host.catalog.engines.for_image(host.settings.images["engine"])[1]


def _draft_from_repository(source: str, host: Target) -> Draft:
    repository, _, revision = source.partition("@")
    if not is_repository(repository):
        problem = "is neither a file nor ORG/NAME[@REVISION]"
        raise CatalogError.single(source, problem, "check the spelling")
    revision = revision or "main"
    hub = host.settings.hub
    content = describe_repository(f"{repository}@{revision}", hub, all_documents=True)
    card = read_model_card(hub.endpoint, repository, content.commit, read_hub_token(hub))
    metadata = make_metadata(repository, content)
    return make_draft(metadata, content, card, host.catalog.engines, read_families(), revision)


def make_draft(
    metadata: RepoMetadata,
    content: RepositoryDescription,
    card: ModelCard,
    engines: Engines,
    families: Families,
    revision: str,
) -> Draft:
    draft = Draft(metadata.repository, metadata.commit)
    draft.about = list(_about_lines(metadata, content, card, revision))
    task = detect_task(metadata, content, card, engines)
    if task != "chat":
        draft.put("task", task, _TASK_COMMENTS[task])
    if metadata.vision_bytes and metadata.architecture.endswith("ForConditionalGeneration"):
        comment = "The model has a vision tower; set engine.vision: true to use it."
        draft.put("vision", True, comment)
    if isinstance(content.documents.get(CONFIG, {}).get("audio_config"), dict):
        comment = "config.json describes an audio tower, so checks send two audio clips."
        draft.put("audio", True, comment)
    if any(path.startswith("model") for path in content.files):
        patterns = [form for form in _OTHER_FORMATS if fnmatch.filter(content.files, form)]
        draft.put("leave_out", patterns, "The same weights in other formats are not downloaded.")
    if task == "chat":
        _add_parsers(draft, metadata, families)
    draft.open_questions += _open_questions(metadata, content)
    return draft


def _add_parsers(draft: Draft, metadata: RepoMetadata, families: Families) -> None:
    family = families.find(metadata.model_type, metadata.repository)
    if family is None:
        model_type = metadata.model_type or "models without model_type"
        question = f"parsers: unknown for {model_type}, so tool calls and reasoning stay plain text"
        draft.open_questions.append(question)
        return
    parsers = {"reasoning": family.reasoning, "tool_call": family.tool_call}
    parsers = {kind: parser for kind, parser in parsers.items() if parser}
    draft.put("parsers", parsers, f"From {family.source}.")
    checks = {kind: True for kind in ("tool_call", "reasoning") if kind in parsers}
    comment = "These checks run in addition to the general questions."
    draft.put("check", {**checks, "conversation": True}, comment)


def detect_task(
    metadata: RepoMetadata, content: RepositoryDescription, card: ModelCard, engines: Engines
) -> str:
    name, architecture = metadata.repository.lower(), metadata.architecture
    if card.task == "text-ranking" or "rerank" in name:
        return "reranking"
    if card.task in ("text-classification", "zero-shot-classification"):
        return "classification"
    is_embedding = card.task in ("sentence-similarity", "feature-extraction")
    if is_embedding or "modules.json" in content.files or "embedding" in name:
        return "embedding"
    for engine in engines.engines.values():
        if architecture in engine.pools and architecture not in engine.generates:
            return "embedding"
    template = content.documents.get(TOKENIZER, {}).get("chat_template")
    has_template_file = any(path.startswith("chat_template.") for path in content.files)
    return "chat" if template or has_template_file else "completion"


def _about_lines(
    metadata: RepoMetadata, content: RepositoryDescription, card: ModelCard, revision: str
) -> Iterator[str]:
    sizes = (size for size in content.files.values() if size and 0 < size < _MAX_FILE_BYTES)
    total_gb = sum(sizes) / 1e9
    yield (
        f"Written by `spark-deploy add` from {metadata.repository} at {revision}, "
        f"commit {metadata.commit[:12]}. The first deploy checks the model."
    )
    yield f"license: {card.license or 'unknown'}" + (", gated" if card.is_gated else "")
    yield (
        f"architecture: {metadata.architecture or 'unknown'}; "
        f"quantization: {metadata.quantization or 'none'}; {total_gb:.1f} GB of files: "
        f"{metadata.weights_bytes / 1e9:.1f} GB of weights that are always loaded, "
        f"{metadata.vision_bytes / 1e9:.1f} GB for vision or audio, "
        f"{metadata.drafter_bytes / 1e9:.1f} GB for a built-in drafter"
    )
    if metadata.context_tokens:
        yield f"context: {metadata.context_tokens:,} tokens"
    config = content.documents.get(GENERATION, {})
    sampling = [f"{key} {config[key]}" for key in _SAMPLING if _is_plausible(config.get(key))]
    if sampling:
        defaults = ", ".join(sampling)
        yield f"the engine uses the publisher's sampling defaults: {defaults}"


def _is_plausible(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 10**6  # type: ignore[arg-type]


def _open_questions(metadata: RepoMetadata, content: RepositoryDescription) -> Iterator[str]:
    if metadata.cache_unknown:
        yield (
            f"KV cache size per token: {metadata.cache_unknown}; "
            "set engine.kv_cache_gib to limit the cache"
        )
    if metadata.drafter_bytes:
        yield "speculation: the model has a drafter; measure which number of draft tokens is best"
    if content.documents.get(CONFIG, {}).get("auto_map"):
        yield (
            "config.json refers to custom code, which is not downloaded; "
            "the engine uses its built-in model class"
        )
