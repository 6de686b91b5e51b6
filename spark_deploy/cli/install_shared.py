"""Put files into the catalog beside an inventory, and what somebody shared into its lock."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml
from spark_contract import files

from spark_deploy.cli.editors import schema_line
from spark_deploy.cli.hosts import Target
from spark_deploy.cli.share import Identity, Shared
from spark_deploy.cli.terminal import note
from spark_deploy.config.catalog.load import read_catalog, read_file
from spark_deploy.config.checkout import catalog_files, catalog_names
from spark_deploy.config.errors import CatalogError, LockError
from spark_deploy.lock import hub
from spark_deploy.lock.file import checked, read_lock, write_lock
from spark_deploy.lock.hub_token import read_hub_token
from spark_deploy.lock.types import LockedSource, without_tag


def write_files(root: Path, texts: Mapping[tuple[str, str], str], *, force: bool) -> list[Path]:
    """Write files by (kind, name); refuse those that nobody could use, or that are there.

    Returns where they are.

    Raises:
        CatalogError: nothing was changed.
    """
    paths = {pair: root / "catalog" / pair[0] / f"{pair[1]}.yml" for pair in texts}
    for path in paths.values():
        if path.exists() and not force:
            what = "is there already"
            raise CatalogError.one(str(path), what, "remove it, or write over it with --force")
    before = {path: path.read_bytes() if path.exists() else None for path in paths.values()}
    try:
        for pair, path in paths.items():
            schema = _schema_of(pair[0], texts[pair])
            files.write_text(path, schema_line(root, path, schema) + texts[pair])
        _check(root, list(texts))
    except BaseException:  # whatever ends it, a full disk or Ctrl-C: all files or none
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != content:
                files.write_pieces(path, [content])
        raise
    for (kind, name), path in paths.items():
        ours = catalog_files(kind).get(name)
        if ours is not None and ours != path:
            note(f"{name} is one of our {kind} as well: the new file is used instead of it")
        note(f"{path}: written")
    return list(paths.values())


def _schema_of(kind: str, text: str) -> str:
    if kind == "profiles":
        return "profile"
    return "plain_model" if re.search(r"^kind: plain\b", text, re.MULTILINE) else "model"


def _check(root: Path, pairs: list[tuple[str, str]]) -> None:
    catalog = read_catalog(own=root)
    models = [name for kind, name in pairs if kind == "models"]
    for model in models:
        catalog.model(model)
        for kind, profile in pairs:
            if kind == "profiles":
                catalog.profile(profile, model)


def take(shared: Shared, host: Target, *, force: bool) -> tuple[list[Path], list[str]]:
    """Write what somebody shared, its commits as the hub here confirms them.

    Returns the files that were written, and what is open.

    Raises:
        SparkError: it cannot be used, or the hub knows other files; nothing was changed.
    """
    root = host.settings.root
    wanted = {("models", shared.name): shared.model}
    wanted[("profiles", shared.profile_name)] = shared.profile
    texts = {
        (kind, name): _text(shared, keys)
        for (kind, name), keys in wanted.items()
        if _there(kind, name, root) != keys
    }
    if ("profiles", shared.profile_name) in texts and not force:
        _refuse_ours(shared.profile_name)
    locked = list(_confirmed(shared, host))
    written = write_files(root, texts, force=force)
    path = host.settings.lock_path
    lock = read_lock(path)
    changed = checked(lock.also(locked))
    if changed != lock:
        write_lock(path, changed)
        note(f"{path}: {len(locked)} repositories as they were shared")
        written.append(path)
    return written, list(_open(shared, host))


def _refuse_ours(profile: str) -> None:
    """Refuse to put a stranger's file in the place of a profile that other models have, too."""
    if profile in catalog_names("profiles"):
        what = "is a profile of ours, here with other keys: every model with it would change"
        fix = "give it another profile_name in the file, or take it with --force"
        raise CatalogError.one(f"profile {profile}", what, fix)


def _there(kind: str, name: str, root: Path) -> dict[str, object] | None:
    try:
        return read_file(kind, name, own=root)
    except CatalogError:
        return None


def _text(shared: Shared, keys: Mapping[str, object]) -> str:
    said = yaml.safe_dump(dict(keys), sort_keys=False, width=96, allow_unicode=True)
    return f"# Taken by `spark-deploy add` from what somebody shared of {shared.name}.\n{said}"


def _confirmed(shared: Shared, host: Target) -> Iterator[LockedSource]:
    """Yield the shared commits with the files that the hub itself names.

    Of other repositories nothing is taken: whoever shares one model decides nothing of another.
    """
    settings, lock = host.settings.settings.hub, read_lock(host.settings.lock_path)
    token = read_hub_token(settings)
    for repo, one in shared.sources.items():
        if repo not in shared.words:
            what = f"neither {shared.name} nor {shared.profile_name} names this repository"
            raise LockError.one(repo, what, "take it out of sources in the file")
        known = lock.sources.get(repo)
        if known is not None and known.commit != one.commit:
            what = f"is locked here at {known.commit[:12]}, and was shared at {one.commit[:12]}"
            fix = f"remove it from {host.settings.lock_path.name}, or serve your own"
            raise LockError.one(repo, what, fix)
        found = hub.look_up(settings.endpoint, repo, one.commit, token)
        if found.commit != one.commit:
            raise LockError.one(repo, f"the hub has no commit {one.commit}", "ask who shared it")
        yield replace(found, revision=one.revision)


def _moved(repo: str, one: Identity, host: Target) -> Iterator[str]:
    """Yield where the revision that was asked for is by now, when that is elsewhere."""
    hub_settings = host.settings.settings.hub
    token = read_hub_token(hub_settings)
    try:
        now = hub.look_up(hub_settings.endpoint, repo, one.revision, token).commit
    except LockError as error:
        yield error.problems[0].line
        return
    if now != one.commit:
        yield f"{repo}: {one.revision} is {now[:12]} by now, and was shared at {one.commit[:12]}"


def _open(shared: Shared, host: Target) -> Iterator[str]:
    """Yield what whoever takes the file has to know."""
    images = host.settings.settings.images.values()
    for reference, digest in shared.images.items():
        if reference not in map(without_tag, images):
            yield f"it was served by {reference}@{digest[:19]}, which is none of your images"
    for repo, one in shared.sources.items():
        yield from _moved(repo, one, host)
    proof = shared.proof
    if proof is None:
        yield "it was shared without a proof"
        return
    passed = sum(proof.checks.values())
    said = f"{proof.level} check of {proof.checked_at}, {passed} of {len(proof.checks)} passed"
    stand_in = ", PORTABLE MODE" if proof.portable else ""
    yield f"by whoever shared it: {said} with engine {proof.engine or 'unknown'}{stand_in}"
