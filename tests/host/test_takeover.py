"""A host that the release before deployed is taken over with nothing restarted.

What was on the host then is written by that release's own code, so its records are real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import release_before
from tests.clients import Seen, clients
from tests.labkit import CHECKOUT, SPARE, Site, guest_named, lab
from tests.runs import Run

pytestmark = pytest.mark.gate

NAME = SPARE[0]
# What a takeover changes; the builder's packages are those of requirements.txt.
TOOLS_ALONE = ["Tools | Install the builder's Python packages", "Tools | Install host tools"]
CAPITAL = "What is the capital of France?"


@dataclass(frozen=True)
class Takeover:
    """What was on the host before and after the first run of this release, and that run."""

    host: release_before.Upgraded
    before: dict[str, object]
    after: dict[str, object]
    old_tools: str
    dry: Run
    run: Run
    seen: list[Seen]


def look(host: release_before.Upgraded) -> dict[str, object]:
    return {
        "release": host.guest.release(),
        "release.json": host.release_sha256(),
        "processes": host.processes(),
        "systemd": host.done_by_systemd(),
        "files": host.kept(),
        "boots": host.guest.boots(),
        "names": host.guest.names(),
        "answer": host.guest.ask(CAPITAL)[1]["choices"],
        "proven": host.proven(),
    }


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release_before.unpacked(tmp_path_factory.mktemp("release-before"))


@pytest.fixture(scope="module")
def takeover(tmp_path_factory: pytest.TempPathFactory, earlier: Path) -> Iterator[Takeover]:
    root = tmp_path_factory.mktemp("site")
    lab("up", NAME, "--fresh", "--engine", "stub")
    link = root / "checkout"
    link.symlink_to(earlier)
    host = release_before.Upgraded(Site(root, hosts=[NAME], checkout=link), guest_named(NAME))
    # Of all exposures the one whose watch may reload the gateway: it runs the earlier code on.
    host.site.choose(model="lab-stub", profile="v2", serve={"expose": "docker"})
    host.deploy()
    # A change and a way back too, so that there is one record of each kind.
    host.site.choose(profile="agent")
    host.deploy()
    host.site.choose(profile="v2")
    host.deploy()
    host.deploy().must_have_changed_nothing()
    before, old_tools = look(host), host.tools()

    host.use(CHECKOUT)
    dry = host.deploy(dry=True)
    with clients(host.guest, host.guest.names()[0]) as seen:
        run = host.deploy()

    yield Takeover(host, before, look(host), old_tools, dry, run, seen)
    lab("down", NAME)


def identities(checkout: Path, model: str, profile: str) -> dict[str, Any]:
    """Return what a tree would put on a Spark: a difference means that something is made anew."""
    words = ["plan", "--estimate", "--json", "--model", model, "--profile", profile]
    said = subprocess.run(
        [sys.executable, "-m", "spark_deploy", *words], cwd=checkout, capture_output=True,
        text=True, check=False, env={**os.environ, **release_before.environment(checkout)},
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    [plan] = json.loads(said.stdout)
    return {
        "release": plan["serve"]["digest"],
        "release.json": _served_by(plan["serve"]),
        "unit": plan["unit"],
        "image": plan["image"]["tag"],
        "plugin": plan["image"]["context_digest"],
        "checkpoint": _made_of(plan["checkpoint"] or {}),
        "sources": [source["dir"] for source in plan["sources"]],
        "gateway": _reached_by(plan["gateway"]),
    }


def _made_of(checkpoint: dict[str, Any]) -> str | None:
    """Return the digest of a tree to build; it stands in the builder's order now."""
    return checkpoint.get("order", checkpoint).get("digest")


def _served_by(serve: dict[str, Any]) -> dict[str, Any]:
    """Return what release.json is made of; a plan repeated parts of it once."""
    stated = serve.get("release", serve)
    return {key: value for key, value in stated.items() if key not in ("name", "digest")}


def _reached_by(gateway: dict[str, Any]) -> dict[str, Any]:
    """Return who reaches a service and how; since the contract the settings stand apart."""
    stated = {**gateway, **gateway.get("settings", {})}
    key = stated.pop("key")
    given = (name for name in ("env", "file", "command") if key.get(name))
    names = ("service", "expose", "port", "address", "max_body_bytes", "max_requests_per_s", "tls")
    return {
        "key": key.get("kind") or next(given, "generate"),
        **{name: stated[name] for name in (*names, "key_path")},
    }


@pytest.mark.parametrize("profile", ["base", "v2", "v2-tq", "v2-native", "agent", "online-fp8"])
def test_a_spark_would_be_given_what_the_release_before_gave_it(
    earlier: Path, profile: str
) -> None:
    for model in ("qwen3.5-35b", "qwen3.5-122b"):
        with ThreadPoolExecutor() as pool:
            before, now = pool.map(
                lambda tree, model=model: identities(tree, model, profile), (earlier, CHECKOUT)
            )
        for what, was in before.items():
            assert now[what] == was, (model, what)


def test_a_host_of_the_release_before_is_taken_over_with_nothing_restarted(
    takeover: Takeover,
) -> None:
    assert takeover.before["proven"]
    assert "spark-watch@" in str(takeover.before["processes"])
    assert "Started spark-serve@" in str(takeover.before["systemd"])
    for what, before in takeover.before.items():
        assert takeover.after[what] == before, what
    assert takeover.host.tools() != takeover.old_tools
    assert takeover.run.changed == takeover.dry.predicted == TOOLS_ALONE
    assert {one.kind for one in takeover.seen} == {"right"}
    takeover.host.deploy().must_have_changed_nothing()
    # Twice as long as a watch waits between two looks.
    takeover.host.guest.run("sleep 4")
    assert takeover.host.processes() == takeover.before["processes"]


def test_a_clone_without_the_release_before_says_so(tmp_path: Path) -> None:
    shallow = tmp_path / "clone"
    words = ["git", "clone", "-q", "--depth", "1", f"file://{CHECKOUT}", str(shallow)]
    subprocess.run(words, check=True, capture_output=True)

    with pytest.raises(AssertionError, match="fix: git fetch --unshallow"):
        release_before.unpacked(tmp_path / "tree", clone=shallow)


def test_the_watch_goes_on_with_the_code_it_began_with_until_it_starts_anew(
    takeover: Takeover,
) -> None:
    host = takeover.host
    # It may still import: the folder stays.
    assert host.watched_by() == takeover.old_tools
    host.guest.run(f"ls {takeover.old_tools}/bin/spark-host")
    engine = host.guest.unit(host.guest.serving()[0], "InvocationID", "MainPID", "NRestarts")

    host.guest.run("systemctl restart 'spark-watch@*'")

    assert host.watched_by() == host.tools() != takeover.old_tools
    assert host.guest.unit(host.guest.serving()[0], *engine) == engine
    host.deploy().must_have_changed_nothing()


def test_a_change_and_a_way_back_go_over_what_the_release_before_recorded(
    takeover: Takeover,
) -> None:
    host, first = takeover.host, takeover.before["release"]
    host.site.choose(profile="v2-tq")
    away = host.deploy()
    there = host.guest.release()
    assert f"Serve | Serve the release on {NAME}" in away.changed
    assert there != first
    assert host.guest.answers(CAPITAL, "Paris")

    back = host.deploy("deploys/rollback.py")

    assert back.changed == [f"Rollback | Go back on {NAME}"]
    assert host.guest.release() == first
    assert host.guest.boots() == host.guest.serving()
    assert host.release_sha256() == takeover.before["release.json"]
    assert host.proven()
    assert host.guest.answers(CAPITAL, "Paris")
    host.site.choose(profile="v2")
    host.deploy().must_have_changed_nothing()
