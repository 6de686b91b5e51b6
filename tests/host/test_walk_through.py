"""A new owner's way, from the README alone: few commands and few edits, and they are counted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.labkit import CHECKOUT, SPARE, Guest, Site, guest_named, info, lab

pytestmark = pytest.mark.host


# What inventory/lab.py works out of the running lab.
SEEN = """
import json, runpy, sys
import spark_deploy.inventory as inventory
seen = {}
inventory.group_from = lambda *words, **more: seen.update(more["generated"]) or ([], {})
runpy.run_path(sys.argv[1])
print(json.dumps(seen))
"""


@dataclass
class Owner:
    """Somebody with a terminal: every command and every edit is counted."""

    folder: Path
    env: dict[str, str]
    commands: list[list[str]] = field(default_factory=list)
    edits: int = 0

    def types(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``spark-deploy`` and count it."""
        self.commands.append(list(words))
        done = subprocess.run(
            [sys.executable, "-m", "spark_deploy", *words],
            cwd=cwd or self.folder, env={**os.environ, **self.env}, text=True,
            capture_output=True, stdin=subprocess.DEVNULL, timeout=900, check=False,
        )  # fmt: skip
        sys.stdout.write(f"$ spark-deploy {' '.join(words)}\n{done.stdout}{done.stderr}")
        return done

    def edits_profile(self, profile: str) -> None:
        """Write another profile into the one file of settings."""
        path = self.folder / "group_vars/all.yml"
        text, found = re.subn(r"^profile: \S+", f"profile: {profile}", path.read_text(), flags=re.M)
        assert found == 1
        path.write_text(text)
        self.edits += 1


@dataclass
class Walk:
    """What was done, and what it led to."""

    owner: Owner
    guest: Guest
    first: subprocess.CompletedProcess[str]


def the_world_of_the_lab(folder: Path, site: Site) -> None:
    """Say what is otherwise in the lab than in the world: hub, registry, packages, time limits.

    No choice of an owner: they are in group_vars/all.yml.
    """
    done = subprocess.run(
        [sys.executable, "-c", SEEN, str(site.root / "inventory/lab.py")],
        capture_output=True, text=True, check=True, cwd=CHECKOUT,
    )  # fmt: skip
    generated = json.loads(done.stdout)
    settings = yaml.safe_load((CHECKOUT / "group_vars/lab.yml").read_text())
    merged = {**settings, **generated}
    for chosen in ("model", "profile", "lock_file"):
        merged.pop(chosen, None)
    merged["docker"] = {**settings.get("docker", {}), **generated["docker"]}
    merged["ssh"].pop("user")
    (folder / "group_vars/spark.yml").write_text(yaml.safe_dump(merged, sort_keys=False))


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    name = SPARE[0]
    lab("up", name, "--fresh", "--bootstrap-guest", name, "--engine", "stub")
    about = next(guest for guest in info()["guests"] if guest["name"] == name)
    root = tmp_path_factory.mktemp("owner")
    site = Site(root / "lab", hosts=[name])
    password, host_keys = root / "password", root / "host_keys"
    password.touch(mode=0o600)
    password.write_text(about["password"] + "\n")
    host_keys.write_text(f"{about['ip']} {about['host_key']}\n")
    # What a person would type at the questions for password and host key.
    answers = {
        "SPARK_BOOTSTRAP_PASSWORD_FILE": str(password),
        "SPARK_BOOTSTRAP_HOST_KEYS_FILE": str(host_keys),
    }
    owner = Owner(root / "own", {**answers, "XDG_CACHE_HOME": str(root / "cache")})
    shutil.copytree(
        Path.home() / ".cache/spark-deploy", root / "cache/spark-deploy", dirs_exist_ok=True,
        ignore_dangling_symlinks=True,
    ) if (Path.home() / ".cache/spark-deploy").is_dir() else None  # fmt: skip
    done = owner.types(
        "init", "own", "--host", f"{name}={about['ip']}", "--user", info()["ssh"]["user"],
        "--model", "lab-stub", cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    the_world_of_the_lab(owner.folder, site)
    first = owner.types("up", "-y")
    return Walk(owner, guest_named(name), first)


def test_the_first_server_takes_two_commands_and_no_edit(walk: Walk) -> None:
    assert walk.first.returncode == 0, walk.first.stdout[-4000:] + walk.first.stderr[-2000:]
    assert (len(walk.owner.commands), walk.owner.edits) == (2, 0)
    assert walk.guest.answers("What is the capital of France?", "Paris")


def test_it_says_what_will_happen_then_what_serves_where_and_how_proven(walk: Walk) -> None:
    said = walk.first.stdout
    assert f"{walk.guest.name}: new here: will serve lab-stub with v2" in said
    assert re.search(rf"{walk.guest.name}  serves lab-stub with profile v2 .*http://\S+", said)
    assert re.search(r"proof: full check of \S+, \d+ checks", said)
    assert re.search(r"took \d+:\d\d \(.*engine \d+:\d\d", said)
    assert re.search(r"changed \d+ of \d+ steps", said)


def test_a_line_is_never_said_twice_and_none_is_wider_than_a_screen_of_words(walk: Walk) -> None:
    lines = [line for line in walk.first.stdout.splitlines() if line.strip()]
    assert len(lines) == len(set(lines))
    assert len(lines) < 60


def test_it_runs_the_line_it_prints(walk: Walk) -> None:
    [line] = [text for text in walk.first.stderr.splitlines() if "deploy.py" in text]
    assert line.split()[0].endswith("pyinfra")
    assert line.split()[-1] == "-y"


def test_a_switch_is_one_edit_and_one_command_and_so_is_the_way_back(walk: Walk) -> None:
    before = len(walk.owner.commands)
    walk.owner.edits_profile("agent")
    dry = walk.owner.types("up", "--dry")
    assert "v2 → agent (lab-stub); " in dry.stdout
    assert re.search(r"nothing to download; engine restarts; clients get 503 for about", dry.stdout)
    assert walk.guest.answers("What is the capital of France?", "Paris")

    switched = walk.owner.types("up", "-y")
    assert switched.returncode == 0, switched.stdout[-4000:]
    assert "--enable-prefix-caching" in walk.guest.argv()
    back = walk.owner.types("rollback", "-y")
    assert back.returncode == 0, back.stderr[-4000:]
    assert "--no-enable-prefix-caching" in walk.guest.argv()
    assert (walk.owner.edits, len(walk.owner.commands) - before) == (1, 3)


def test_top_and_status_show_what_the_engine_does(walk: Walk) -> None:
    assert walk.guest.answers("What is the capital of France?", "Paris")
    [now] = json.loads(walk.owner.types("top", "--once", "--json").stdout)
    assert now["running"] == 0
    assert now["tokens_per_s"] is not None
    assert walk.owner.types("status").returncode in (0, 1)


def test_a_second_run_changes_nothing(walk: Walk) -> None:
    walk.owner.edits_profile("v2")
    done = walk.owner.types("up", "-y")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is served and proven; nothing of it changes" in done.stdout
    assert "changed nothing" in done.stdout
