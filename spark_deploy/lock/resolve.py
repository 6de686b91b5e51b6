"""Lock names: find out which are missing, ask hub and registries, write the answer down."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import Any

from spark_contract.fetching import (
    ARCHITECTURES,
    MANIFEST_TYPES,
    parse_reference,
    token_question,
)

from spark_deploy.config.catalog.model import Model, PlainModel
from spark_deploy.config.catalog.profile import Profile
from spark_deploy.config.catalog.types import Catalog, version_of
from spark_deploy.config.errors import LockError, Problem
from spark_deploy.config.printable import in_words, one_line
from spark_deploy.config.settings.types import Settings
from spark_deploy.lock.file import checked, read_lock, write_lock
from spark_deploy.lock.hub import LIMIT_S, opened, within
from spark_deploy.lock.hub_token import read_hub_token
from spark_deploy.lock.types import Lock, LockedImage, LockedSource, without_tag

_TIMEOUT_S = 30
_MOST_BYTES = 4 << 20  # what registries take for a manifest; the others are smaller
_ACCEPT = ", ".join(MANIFEST_TYPES)
_ODD_ANSWERS = (HTTPException, ValueError, TypeError, KeyError, AttributeError, RecursionError)


class ImageNotFound(LockError):  # noqa: N818 - named after what happened
    """The registry has no such image or tag."""


def look_up(
    text: str, *, arch: str, insecure: Sequence[str] = (), engine: bool = False
) -> LockedImage:
    """Return digest and compressed size of ``text`` for hosts of ``arch`` (as ``uname -m``).

    An ``engine`` has to start vLLM, which its configuration says: 10 GB are not pulled to find out.

    The digest is the one the tag names: that of the list of platforms when there is one, so the
    same lock serves every architecture. The size is that of the wanted platform.
    """
    try:
        return within(LIMIT_S, lambda: _ask(text, arch, insecure, engine))
    except TimeoutError as error:
        fix = "run again; look whether the registry and the way to it are well"
        raise LockError.one(f"image {text}", f"the registry gives {error}", fix) from error
    except _ODD_ANSWERS as error:
        why = one_line(f"{type(error).__name__}: {error}")
        what = f"the answer is not that of a registry ({why})"
        fix = "correct the image's address; a proxy may have answered in the registry's place"
        raise LockError.one(f"image {text}", what, fix) from error


def _ask(text: str, arch: str, insecure: Sequence[str], engine: bool) -> LockedImage:
    reference = parse_reference(text)
    client = _Client(reference.base_url(plain=reference.host in insecure), text)
    manifest, digest = client.manifest(reference.version)
    if "manifests" in manifest:
        wanted = ARCHITECTURES.get(arch, arch)
        entry = _platform(manifest["manifests"], wanted)
        if entry is None:
            what = f"has no linux/{wanted} image"
            raise LockError.one(f"image {text}", what, "choose a tag built for this architecture")
        manifest, _ = client.manifest(entry["digest"])
    if engine:
        _must_start_vllm(client.configuration(manifest), text)
    size = sum(int(layer["size"]) for layer in manifest.get("layers", ()))
    return LockedImage(text, digest, size)


def _must_start_vllm(configuration: Mapping[str, Any], text: str) -> None:
    words = " ".join(configuration["config"].get("Entrypoint") or ())
    if "vllm" not in words:
        what = f"starts {words!r}, not vLLM's server" if words else "starts nothing by itself"
        fix = "name an image whose entrypoint is `vllm serve`, such as vllm/vllm-openai"
        raise LockError.one(f"image {text}", f"is no engine: it {what}", fix)


class _Client:
    """One repository of one registry, with the token it asked for."""

    def __init__(self, base: str, shown: str) -> None:
        self._base = base
        self._shown = shown
        self._token: str | None = None

    def manifest(self, version: str) -> tuple[dict[str, Any], str]:
        """Return a manifest and its digest."""
        body, headers = self._get(f"{self._base}/manifests/{version}")
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        claimed = headers.get("Docker-Content-Digest", digest)
        if claimed != digest or (version.startswith("sha256:") and version != digest):
            what = f"the registry sent other bytes than {one_line(claimed)}"
            raise LockError.one(f"image {self._shown}", what, "try again; check for a proxy")
        data: dict[str, Any] = json.loads(body)
        return data, digest

    def configuration(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a manifest's image is configured to do."""
        digest = manifest["config"]["digest"]
        body, _ = self._get(f"{self._base}/blobs/{digest}")
        if f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
            what = f"the registry sent other bytes than {one_line(digest)}"
            raise LockError.one(f"image {self._shown}", what, "try again; check for a proxy")
        data: dict[str, Any] = json.loads(body)
        return data

    def _get(self, url: str) -> tuple[bytes, HTTPMessage]:
        request = urllib.request.Request(url, headers={"Accept": _ACCEPT})
        if self._token:  # for the registry alone: blobs often lie elsewhere
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with opened(request, timeout=_TIMEOUT_S) as answer:
                return _body(answer), answer.headers
        except urllib.error.HTTPError as error:
            if error.code != 401 or self._token:
                raise self._refused(error) from error
            self._token = self._ask_token(error.headers.get("WWW-Authenticate", ""))
            return self._get(url)
        except OSError as error:
            why = in_words(one_line(getattr(error, "reason", error)))
            what = f"the registry cannot be asked: {why}"
            fix = "check the network; a registry over plain HTTP belongs in registries.insecure"
            raise LockError.one(f"image {self._shown}", what, fix) from error

    def _ask_token(self, challenge: str) -> str:
        question = token_question(challenge, ("https",))
        if question is None:
            fix = "use a registry that can be read without a login"
            raise LockError.one(f"image {self._shown}", "the registry wants a login", fix)
        realm, fields = question
        try:
            url = f"{realm}?{urllib.parse.urlencode(fields)}"
            with opened(url, timeout=_TIMEOUT_S) as answer:
                data = json.loads(_body(answer))
        except OSError as error:
            why = getattr(error, "reason", error)
            what = f"{one_line(realm)} gives no token: {one_line(why)}"
            fix = "use an image that can be read without a login, or check the network"
            raise LockError.one(f"image {self._shown}", what, fix) from error
        return str(data.get("token") or data.get("access_token"))

    def _refused(self, error: urllib.error.HTTPError) -> LockError:
        if error.code == 404:
            fix = "correct the tag under images"
            return ImageNotFound.one(f"image {self._shown}", "no such image or tag", fix)
        what = f"the registry answered {error.code} {one_line(error.reason)}"
        return LockError.one(f"image {self._shown}", what, "try again later")


def _body(answer: HTTPResponse) -> bytes:
    body = answer.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise ValueError(f"longer than {_MOST_BYTES} bytes")
    if answer.length:  # a read of so many bytes says nothing of those that never came
        raise ValueError(f"broke off with {answer.length} bytes missing")
    return body


def _platform(entries: Sequence[Mapping[str, Any]], arch: str) -> Mapping[str, Any] | None:
    for entry in entries:
        platform = entry.get("platform", {})
        if platform.get("os") == "linux" and platform.get("architecture") == arch:
            return entry
    return None


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Names:
    """Names a host needs: (repository, revision) pairs and image references."""

    sources: frozenset[tuple[str, str]]
    images: frozenset[str]

    def missing_in(self, lock: Lock) -> Names:
        """Return what ``lock`` does not hold."""
        return Names(
            frozenset(name for name in self.sources if lock.source(*name) is None),
            self.images - lock.images.keys(),
        )

    def without(self, names: Collection[str]) -> Names:
        """Return what is not among ``names``."""
        left = frozenset(source for source in self.sources if source[0] not in names)
        return Names(left, self.images.difference(names))

    @property
    def names(self) -> list[str]:
        """Return all names, sorted, for messages."""
        return sorted([repo for repo, _ in self.sources] + list(self.images))


def wanted_by(settings: Settings, catalog: Catalog) -> Names:
    """Return the names that the plan of one host needs, pairs to have ready included."""
    sources: set[tuple[str, str]] = set()
    roles = {"gpu_check"}
    for one in settings.all_served:
        model = catalog.model(one.model)
        profile = catalog.profile(one.profile, one.model)
        sources.update(_repositories(model, profile, one))
        roles.add(model.image.role)
    images = frozenset(settings.images[role] for role in roles & set(settings.images))
    refuse_two_revisions(sources)
    return Names(frozenset(sources), images)


def refuse_two_revisions(sources: Iterable[tuple[str, str]]) -> None:
    """Refuse a repository that is asked for at two revisions: locking one would drop the other.

    Raises:
        LockError: There is one.
    """
    known: dict[str, str] = {}
    for repo, revision in sorted(sources):
        if known.setdefault(repo, revision) != revision:
            what = f"is asked for at {known[repo]} and at {revision}; a lock holds one of them"
            fix = "choose one revision, or give the hosts of the other a lock_file of their own"
            raise LockError.one(repo, what, fix)


def _repositories(model: Model, profile: Profile, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the repositories of one pair, each with its revision."""
    yield from beside_of(model, profile)
    if isinstance(model, PlainModel):
        yield model.repository, model.revision
        return
    start = model.sources.hybrid if settings.checkpoint.prebuilt else model.sources.base
    if settings.checkpoint.requantized:
        start = model.sources.original
    # A model without that one is refused by the plan, in better words.
    yield start or model.sources.base, model.sources.revision
    if profile.shared_experts == "fp8-donor" and model.sources.donor:
        yield model.sources.donor, model.sources.revision


def beside_of(model: Model, profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield the repositories that an engine loads beside the model's."""
    drafts = profile.speculation
    if drafts and drafts.repository:
        yield drafts.repository, drafts.revision
    for one in model.adapters.values():
        yield one.repository, one.revision


def locked_for(settings: Settings, catalog: Catalog, path: Path, say: Say) -> Lock:
    """Return a lock that holds all names of ``settings``, locking new ones as they allow."""
    lock = read_lock(path)
    missing = wanted_by(settings, catalog).missing_in(lock)
    if not missing.names:
        return lock
    if settings.locked == "required":
        fix = "run `spark-deploy update --missing` and keep the file, or set locked: first-use"
        raise LockError(
            [Problem(f"{path.name}: {name}", "is not locked", fix) for name in missing.names]
        )
    say(f"locking {len(missing.names)} new names in {path.name}")
    lock = resolve(lock, missing, settings, catalog.engines.engines, say)
    write_lock(path, lock)
    return lock


def resolve(
    lock: Lock, wanted: Names, settings: Settings, engines: Collection[str], say: Say
) -> Lock:
    """Look up ``wanted`` at hub and registries; return the lock with the answers.

    ``engines`` are the supported versions, suggested when an engine's tag does not exist.
    """
    sources = [_source(name, settings, say) for name in sorted(wanted.sources)]
    images = [_image(name, settings, engines, say) for name in sorted(wanted.images)]
    return checked(lock.also(sources, images))


def _source(name: tuple[str, str], settings: Settings, say: Say) -> LockedSource:
    repo, revision = name
    token = read_hub_token(settings.hub)
    if token and settings.hub.token is None:
        say(f"  {repo}: asking with your Hugging Face login")
    # Its client takes a fifth of a second to import, and most runs ask no hub.
    from spark_deploy.lock import hub

    found = hub.look_up(settings.hub.endpoint, repo, revision, token)
    say(f"  {repo}: {revision} is commit {found.commit[:12]}, {size(found.size_bytes)}")
    if found.left_out:
        first = next(iter(found.left_out.items()))
        say(f"  {repo}: {len(found.left_out)} files are not fetched, {first[0]}: {first[1]}")
    return found


def _image(reference: str, settings: Settings, engines: Collection[str], say: Say) -> LockedImage:
    roles = [role for role, image in settings.images.items() if image == reference]
    is_engine = any(role != "gpu_check" for role in roles)
    try:
        found = look_up(
            reference,
            arch=settings.expect.arch,
            insecure=settings.registries.insecure,
            engine=is_engine,
        )
    except ImageNotFound as error:
        others = {version for version in engines if version != version_of(reference)}
        if not is_engine or not others:
            raise
        newest_first = sorted(others, key=lambda one: tuple(map(int, one.split("."))), reverse=True)
        images = " or ".join(f"{without_tag(reference)}:v{version}" for version in newest_first)
        fix = f"set images.{roles[0]} to a supported version that exists: {images}"
        raise LockError.one(f"image {reference}", error.problems[0].what, fix) from error
    say(f"  {reference}: {found.digest[:19]}, {size(found.size_bytes)} compressed")
    return found


def size(size_bytes: int) -> str:
    """Write bytes for people: ``72.4 GB``."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1000
    return f"{value:.1f} GB"
