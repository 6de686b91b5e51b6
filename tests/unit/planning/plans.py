"""Plans of the test catalog, and of the shipped catalog with a made-up lock."""

import functools
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spark_deploy.config.catalog.architecture import RepoMetadata
from spark_deploy.config.catalog.load import read_catalog
from spark_deploy.config.catalog.model import HybridModel, PlainModel
from spark_deploy.config.catalog.types import Catalog
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import PlanError, Problem
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.resolve import required_names
from spark_deploy.lock.types import EMPTY_LOCK, Lock, LockedImage, LockedSource, SourceFile
from spark_deploy.plan.host import plan_host
from spark_deploy.plan.memory import weight_sizes
from spark_deploy.plan.resolve import Request, plan_problems
from spark_deploy.plan.types import HostPlan, PayloadIdentity

FIXTURE = CHECKOUT / "tests" / "fixtures" / "checkout"
CATALOG = read_catalog(FIXTURE)
LARGE = CATALOG.model("large")
PAYLOAD = PayloadIdentity("1" * 64, "2" * 64, "requirements.txt")
NOWHERE = Path("/nonexistent")
_SHARD_BYTES = 5_000_000_000
_SMALL = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json")


def settings_of(model: str = "large", profile: str = "v2", **more: Any) -> Settings:
    """Return the default settings with changes; dotted keys."""
    overrides = {"model": model, "profile": profile, **more}
    hosts = load_hosts({"spark": ["a"]}, root=NOWHERE, overrides=overrides, checkout=FIXTURE)
    return hosts["a"].settings


def plan_of(model: str = "large", profile: str = "v2", **more: Any) -> HostPlan:
    return plan_with(settings_of(model, profile, **more))


def plan_with(settings: Settings, catalog: Catalog = CATALOG) -> HostPlan:
    return plan_host(Request("a", settings, catalog, made_up_lock(settings, catalog), PAYLOAD))


@functools.cache
def shipped_catalog() -> Catalog:
    return read_catalog()


def shipped() -> Iterator[tuple[str, str, HostPlan | PlanError]]:
    """Yield every model and profile of the shipped catalog with plan or refusal."""
    for model, profile in shipped_pairs():
        yield model, profile, shipped_plan(model, profile)


@functools.cache
def shipped_pairs() -> tuple[tuple[str, str], ...]:
    return tuple(_pairs(shipped_catalog()))


def _pairs(catalog: Catalog) -> Iterator[tuple[str, str]]:
    for model, profile in itertools.product(catalog.models, catalog.profile_names):
        if (profile == "plain") != isinstance(catalog.models[model], PlainModel):
            continue
        # Profiles that place an n-gram table are for models with one.
        placed = catalog.profile(profile, model).ngram_table
        if profile != "plain" and bool(placed) != bool(
            catalog.models[model].architecture.ngram_table
        ):
            continue
        yield model, profile


@functools.cache
def shipped_plan(model: str, profile: str) -> HostPlan | PlanError:
    catalog = shipped_catalog()
    images = {other.image.role: f"registry.example/{other.image.role}:1"
              for other in catalog.models.values()}  # fmt: skip
    images |= Settings().images
    try:
        return plan_with(Settings(model=model, profile=profile, images=images), catalog)
    except PlanError as error:
        return error


def problems(model: str = "large", profile: str = "v2", **more: Any) -> list[Problem]:
    return plan_problems(settings_of(model, profile, **more), CATALOG)


def problem_texts(model: str = "large", profile: str = "v2", **more: Any) -> list[str]:
    return [problem.what for problem in problems(model, profile, **more)]


def made_up_lock(settings: Settings, catalog: Catalog) -> Lock:
    """Lock every name of ``settings`` to hashes of the name.

    Base checkpoints have the size of their architecture, in shards of 5 GB.
    """
    wanted = required_names(settings, catalog)
    bytes_of = {
        repo: weight_sizes(model.architecture).tree_bytes
        for model in catalog.models.values()
        if isinstance(model, HybridModel)
        for repo in (model.sources.base, model.sources.donor, model.sources.hybrid)
    }
    sources = [
        LockedSource(repo, revision, sha("sha1", repo), _files(repo, bytes_of.get(repo, 0)))
        for repo, revision in sorted(wanted.sources)
    ]
    images = [
        LockedImage(name, f"sha256:{sha('sha256', name)}", 9_800_000_000)
        for name in sorted(wanted.images)
    ]
    repo_metadata = [
        RepoMetadata(repository=source.repo, commit=source.commit) for source in sources
    ]
    return EMPTY_LOCK.with_entries(sources, images, repo_metadata=repo_metadata)


def sha(kind: str, text: str) -> str:
    return hashlib.new(kind, f"made up: {text}".encode()).hexdigest()


def _files(repo: str, size_bytes: int) -> tuple[SourceFile, ...]:
    small = [SourceFile(name, 20_000, git_sha1=sha("sha1", f"{repo} {name}")) for name in _SMALL]
    sizes = [min(_SHARD_BYTES, size_bytes - at) for at in range(0, size_bytes, _SHARD_BYTES)]
    paths = [
        f"model-{number + 1:05}-of-{len(sizes):05}.safetensors" for number in range(len(sizes))
    ]
    shards = [
        SourceFile(path, size, sha256=sha("sha256", f"{repo} {path}"))
        for path, size in zip(paths, sizes, strict=True)
    ]
    return (*small, *shards)
