"""A release: one complete, frozen way of serving, read from its ``release.json``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_contract.errors import HostToolError
from spark_contract.paths import Paths

_NAME = re.compile(r"^(?P<service>[a-z0-9][a-z0-9-]*)-(?P<digest>[0-9a-f]{12})$")


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of the host inside the engine's container."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """How the engine's container is started."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    mounts: tuple[Mount, ...]
    docker_args: tuple[str, ...]
    user: str | None  # of this host; None in releases that ran as root

    def option(self, name: str) -> str | None:
        """Return the value of ``--name VALUE`` or ``--name=VALUE`` in argv."""
        for index, word in enumerate(self.argv):
            if word == name and index + 1 < len(self.argv):
                return self.argv[index + 1]
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return None


@dataclass(frozen=True, slots=True)
class Memory:
    """What a start needs, and the floor the watch defends."""

    needed_bytes: int
    wait_s: float
    floor_bytes: int


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Upper bounds of a start, a stop and a drain."""

    start_s: float
    stop_s: float
    drain_s: float


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt whose answer must match a regular expression."""

    prompt: str
    expect: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Bench:
    """How long the speed is measured, and from where on it counts as clearly worse."""

    limit_s: float
    worse_percent: float


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What the check asks and demands."""

    timeout_s: float
    max_model_len: int
    questions: tuple[Question, ...]
    copy: tuple[str, ...]
    copy_prompt: str
    tool_call: bool
    reasoning: bool
    repeat: bool
    conversation: bool
    image: bool
    stream: bool
    parallel: int
    needle_tokens: int | None
    prefix_block_tokens: int | None
    acceptance_floor: float | None
    log_required: tuple[str, ...]
    log_forbidden: tuple[str, ...]
    portable: bool
    metrics_required: dict[str, Any]
    bench: Bench | None


@dataclass(frozen=True, slots=True)
class Watch:
    """When the watch acts."""

    stall_s: float
    interval_s: float
    memory_samples: int
    hot_celsius: float | None


@dataclass(frozen=True, slots=True)
class Release:
    """Everything that decides how one service runs."""

    name: str
    service: str
    digest: str
    model: str
    profile: str
    names: tuple[str, ...]
    image_tag: str
    image_label: str | None
    image_base: str
    plugin: str
    tree_path: str
    tree_digest: str
    engine: Engine
    memory: Memory
    timeouts: Timeouts
    check: CheckPlan
    watch: Watch

    @property
    def container(self) -> str:
        """The engine container's name."""
        return f"spark-{self.name}"

    @property
    def serve_unit(self) -> str:
        """The unit whose activity means that this release runs."""
        return f"spark-serve@{self.name}.service"


def service_of(name: str) -> str:
    """Return the service in a release name such as ``main-0123456789ab``."""
    match = _NAME.match(name)
    if match is None:
        raise HostToolError(
            f"release {name!r}",
            "not of the form <service>-<12 hex digits>",
            "name one of those that `spark-host status` lists",
            exit_code=2,
        )
    return match["service"]


def names(paths: Paths) -> list[str]:
    """Return the names of all releases on this host."""
    if not paths.releases.is_dir():
        return []
    found = (entry for entry in paths.releases.iterdir() if (entry / "release.json").is_file())
    return sorted(entry.name for entry in found if _NAME.match(entry.name))


def load(name: str, paths: Paths) -> Release:
    """Return the release ``name``.

    Raises:
        HostToolError: The release is absent, malformed, or carries another name.
    """
    service_of(name)
    path = paths.releases / name / "release.json"
    try:
        raw = json.loads(path.read_text())
        release = _parse(raw)
    except FileNotFoundError as error:
        raise HostToolError(
            str(path), "no such release", "run the deploy for this host again", 2
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        what = f"malformed: {type(error).__name__}: {error}"
        raise HostToolError(str(path), what, "run the deploy for this host again", 2) from error
    if release.name != name:
        raise HostToolError(
            str(path), f"carries the name {release.name!r}", "run the deploy again", 2
        )
    return release


def load_if_present(name: str, paths: Paths) -> Release | None:
    """Return the release, or ``None`` when it cannot be read."""
    try:
        return load(name, paths)
    except HostToolError:
        return None


def releases_of_tree(tree: Path, paths: Paths) -> list[str]:
    """Return the releases on this host that load ``tree``: it must outlive them."""
    found = ((name, load_if_present(name, paths)) for name in names(paths))
    return [name for name, release in found if release and Path(release.tree_path) == tree]


def _parse(raw: dict[str, Any]) -> Release:
    if raw.get("schema_version") != 1:
        raise ValueError(f"schema_version {raw.get('schema_version')!r}, known: 1")
    return Release(
        name=raw["name"],
        service=raw["service"],
        digest=raw["digest"],
        model=raw["model"],
        profile=raw["profile"],
        names=tuple(raw["names"]),
        image_tag=raw["image"]["tag"],
        image_label=raw["image"].get("digest_label"),
        image_base=str(raw["image"].get("base") or raw["image"]["tag"]),
        plugin=str(raw["image"].get("plugin") or ""),
        tree_path=raw["tree"]["path"],
        tree_digest=raw["tree"]["digest"],
        engine=_engine(raw["engine"]),
        memory=Memory(
            int(raw["memory"]["needed_bytes"]),
            float(raw["memory"]["wait_s"]),
            int(raw["memory"]["floor_bytes"]),
        ),
        timeouts=Timeouts(**{key: float(value) for key, value in raw["timeouts"].items()}),
        check=_check(raw["check"]),
        watch=Watch(
            float(raw["watch"]["stall_s"]),
            float(raw["watch"]["interval_s"]),
            int(raw["watch"].get("memory_samples", 2)),
            raw["watch"].get("hot_celsius"),
        ),
    )


def _engine(raw: dict[str, Any]) -> Engine:
    mounts = tuple(
        Mount(item["source"], item["target"], bool(item["read_only"])) for item in raw["mounts"]
    )
    return Engine(
        argv=tuple(str(word) for word in raw["argv"]),
        env=tuple((str(key), str(value)) for key, value in sorted(raw["env"].items())),
        mounts=mounts,
        docker_args=tuple(str(word) for word in raw["docker_args"]),
        user=raw.get("user"),
    )


def _check(raw: dict[str, Any]) -> CheckPlan:
    questions = tuple(
        Question(item["prompt"], item["expect"], int(item["max_tokens"]))
        for item in raw["questions"]
    )
    for pattern in (
        *(question.expect for question in questions),
        *raw["log_required"],
        *raw["log_forbidden"],
    ):
        re.compile(pattern)
    floor = raw.get("acceptance_floor")
    bench = raw.get("bench")
    needle, prefix = raw.get("needle"), raw.get("prefix")
    return CheckPlan(
        timeout_s=float(raw["timeout_s"]),
        max_model_len=int(raw["max_model_len"]),
        questions=questions,
        copy=tuple(raw["copy"]),
        copy_prompt=raw.get("copy_prompt", "Repeat exactly: {text}"),
        tool_call=bool(raw["tool_call"]),
        reasoning=bool(raw["reasoning"]),
        repeat=bool(raw["repeat"]),
        conversation=bool(raw.get("conversation", False)),
        image=bool(raw.get("image", False)),
        stream=bool(raw.get("stream", True)),
        parallel=int(raw.get("parallel", 3)),
        needle_tokens=int(needle["context_tokens"]) if needle else None,
        prefix_block_tokens=int(prefix["block_tokens"]) if prefix else None,
        acceptance_floor=None if floor is None else float(floor),
        log_required=tuple(raw["log_required"]),
        log_forbidden=tuple(raw["log_forbidden"]),
        portable=bool(raw["portable"]),
        metrics_required=dict(raw.get("metrics_required") or {}),
        bench=Bench(float(bench["limit_s"]), float(bench["worse_percent"])) if bench else None,
    )


def socket_path(release: Release, paths: Paths) -> Path | None:
    """Return the engine's unix socket on the host; ``None`` when it listens on a port."""
    inside = release.engine.option("--uds")
    if inside is None:
        return None
    return paths.service_run(release.service) / Path(inside).name
