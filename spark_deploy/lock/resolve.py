"""Read the lock file; find the names that are not locked, look them up and write the lock."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from spark_contract import files
from spark_contract.machine import version_key

from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.catalog.types import Catalog, version_of
from spark_deploy.config.checkout import load_schema, read_mapping
from spark_deploy.config.documents import convert, to_yaml_data
from spark_deploy.config.errors import LockError, Problem, SettingsError
from spark_deploy.config.schema_errors import schema_problems
from spark_deploy.config.settings.load import read_secret
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.registry import ImageNotFoundError, look_up_image
from spark_deploy.lock.types import EMPTY_LOCK, Lock, LockedImage, LockedSource, image_name

PrintLine = Callable[[str], None]
_HEAD = """\
# Written by `spark-deploy update`: the commit or digest of every name.
# Keep it in version control. To update a name: `spark-deploy update --only NAME`.
"""
_TOKEN = re.compile(r"[!-~]{1,512}")


def read_lock(path: Path) -> Lock:
    if not path.exists():
        return EMPTY_LOCK
    data, problems = read_mapping(path, label=path.name)
    problems = problems or list(schema_problems(data, load_schema("lock"), lambda key: path.name))
    if problems:
        raise LockError(problems)
    return convert(Lock, data)


def validate_lock(lock: Lock) -> Lock:
    """Return the lock; raise LockError if the hub or a registry sent invalid values."""
    data, where = to_yaml_data(lock, include_nulls=False), "the response of the hub or registry"
    problems = list(schema_problems(data, load_schema("lock"), lambda key: where))
    if problems:
        raise LockError(problems)
    return lock


def write_lock(path: Path, lock: Lock) -> None:
    data = to_yaml_data(lock, include_nulls=False)
    text = _HEAD + yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)
    try:
        files.write_text(path, text)
    except OSError as error:
        fix = "make its directory writable, or set lock_file to another path"
        raise LockError.single(str(path), f"cannot be written: {error.strerror}", fix) from error


@dataclass(frozen=True, slots=True)
class Names:
    """Names to lock."""

    sources: frozenset[tuple[str, str]]  # repository and revision
    images: frozenset[str]  # references

    def missing_in(self, lock: Lock) -> "Names":
        return Names(
            frozenset(key for key in self.sources if lock.source(*key) is None),
            self.images - lock.images.keys(),
        )

    def without(self, names: Collection[str]) -> "Names":
        sources = frozenset(source for source in self.sources if source[0] not in names)
        return Names(sources, self.images.difference(names))

    @property
    def names(self) -> list[str]:
        return sorted([repo for repo, _ in self.sources] + list(self.images))


def required_names(settings: Settings, catalog: Catalog) -> Names:
    """Return the names that a host's services and ``keep_ready`` entries require."""
    sources: set[tuple[str, str]] = set()
    roles = {"gpu_check"}
    for served in settings.all_models:
        model = catalog.model(served.model)
        profile = catalog.profile(served.profile, served.model)
        sources.update(_repositories(model, profile, served))
        roles.add(model.image.role)
    images = frozenset(settings.images[role] for role in roles & set(settings.images))
    check_single_revisions(sources)
    return Names(frozenset(sources), images)


def check_single_revisions(sources: Iterable[tuple[str, str]]) -> None:
    """Raise LockError if a repository is required at two revisions."""
    revisions: dict[str, str] = {}
    for repo, revision in sorted(sources):
        first = revisions.setdefault(repo, revision)
        if first != revision:
            message = f"{first} and {revision} are required, but a lock file pins a single revision"
            fix = "use the same revision, or a separate lock_file for the other hosts"
            raise LockError.single(repo, message, fix)


def _repositories(model: Model, profile: Profile, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each repository and revision that a model needs with a profile."""
    yield from companion_repositories(model, profile)
    if isinstance(model, PlainModel):
        yield model.repository, model.revision
        return
    if settings.checkpoint.source == "requantized":
        repository = model.sources.original
    elif settings.checkpoint.source == "prebuilt":
        repository = model.sources.hybrid
    else:
        repository = model.sources.base
    # The plan rejects models that lack the configured source.
    yield repository or model.sources.base, model.sources.revision
    if profile.shared_experts == "fp8-donor" and model.sources.donor:
        yield model.sources.donor, model.sources.revision


def companion_repositories(model: Model, profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield repository and revision of the drafter and of each adapter."""
    drafter = profile.speculation
    if drafter and drafter.repository:
        yield drafter.repository, drafter.revision
    for adapter in model.adapters.values():
        yield adapter.repository, adapter.revision


def load_or_extend_lock(
    settings: Settings, catalog: Catalog, path: Path, print_line: PrintLine
) -> Lock:
    """Return a lock with all required names; look up missing names if settings allow it."""
    lock = read_lock(path)
    missing = required_names(settings, catalog).missing_in(lock)
    if not missing.names:
        return lock
    if settings.locked == "required":
        fix = "run `spark-deploy update --missing` and keep the file, or set locked: first-use"
        raise LockError(
            [Problem(f"{path.name}: {name}", "is not locked", fix) for name in missing.names]
        )
    print_line(f"locking {len(missing.names)} new names in {path.name}")
    lock = resolve(lock, missing, settings, catalog.engines.engines, print_line)
    write_lock(path, lock)
    return lock


def resolve(
    lock: Lock, names: Names, settings: Settings, engines: Collection[str], print_line: PrintLine
) -> Lock:
    sources = [_lock_source(*source, settings, print_line) for source in sorted(names.sources)]
    images = [_lock_image(name, settings, engines, print_line) for name in sorted(names.images)]
    return validate_lock(lock.with_entries(sources, images))


def _lock_source(
    repo: str, revision: str, settings: Settings, print_line: PrintLine
) -> LockedSource:
    token = read_hub_token(settings.hub)
    if token and settings.hub.token is None:
        print_line(f"  {repo}: using your Hugging Face login")
    # Imported late, because it takes 0.2 s.
    from spark_deploy.lock import hub

    source = hub.look_up_repo(settings.hub.endpoint, repo, revision, token)
    print_line(
        f"  {repo}: {revision} is commit {source.commit[:12]}, {format_size(source.size_bytes)}"
    )
    if source.left_out:
        path, reason = next(iter(source.left_out.items()))
        print_line(
            f"  {repo}: skipping {len(source.left_out)} files, for example {path} ({reason})"
        )
    return source


def _lock_image(
    reference: str, settings: Settings, engines: Collection[str], print_line: PrintLine
) -> LockedImage:
    roles = [role for role, image in settings.images.items() if image == reference]
    is_engine = any(role != "gpu_check" for role in roles)
    try:
        locked = look_up_image(
            reference,
            arch=settings.expect.arch,
            insecure=settings.registries.insecure,
            engine=is_engine,
        )
    except ImageNotFoundError as error:
        other_versions = {version for version in engines if version != version_of(reference)}
        if not is_engine or not other_versions:
            raise
        newest_first = sorted(other_versions, key=version_key, reverse=True)
        images = " or ".join(f"{image_name(reference)}:v{version}" for version in newest_first)
        fix = f"set images.{roles[0]} to a supported version: {images}"
        raise LockError.single(f"image {reference}", error.problems[0].what, fix) from error
    print_line(f"  {reference}: {locked.digest[:19]}, {format_size(locked.size_bytes)} compressed")
    return locked


def format_size(size_bytes: int) -> str:
    """Return a size such as ``72.4 GB``."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    size = size_bytes / 1000
    for unit in ("kB", "MB"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def read_hub_token(hub: HubSettings) -> str | None:
    if hub.token is None:
        return _read_login(hub.endpoint)
    token = read_secret(hub.token, setting="hub.token")
    if not _TOKEN.fullmatch(token):
        message = f"{hub.token.kind} {hub.token.value[0]} does not contain a valid token"
        fix = "store only the token, on a single line without spaces"
        raise SettingsError.single("hub.token", message, fix)
    return token


def _read_login(endpoint: str) -> str | None:
    # Imported late, because it takes 0.3 s.
    from huggingface_hub import constants, get_token

    # The login is valid only for the library's own hub.
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or endpoint.rstrip("/") != constants.ENDPOINT:
        return None
    token = get_token()
    return token if token and _TOKEN.fullmatch(token) else None
