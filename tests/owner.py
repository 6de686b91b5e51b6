"""Somebody who read the pages, with a folder of their own and a terminal, in the lab's world."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.labkit import CHECKOUT

JOBS_PAGE = CHECKOUT / "docs/reference/commands.md"
# What inventory/lab.py works out of the running lab.
SEEN = """
import json, runpy, sys
import spark_deploy.inventory as inventory
seen = {}
inventory.group_from = lambda *words, **more: seen.update(more["generated"]) or ([], {})
runpy.run_path(sys.argv[1])
print(json.dumps(seen))
"""


@dataclass(frozen=True)
class Job:
    """A row of the table of jobs."""

    name: str
    page: str | None
    edits: int
    commands: int
    typed: tuple[str, ...]


def jobs() -> list[Job]:
    """Return the table of jobs."""
    found = []
    for line in JOBS_PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1].isdigit():
            link = re.fullmatch(r"\[(.+)\]\((.+)\)", cells[0])
            name, page = (link[1], link[2]) if link else (cells[0], None)
            typed = tuple(re.findall(r"`([^`]+)`", cells[3]))
            found.append(Job(name, page, int(cells[1]), int(cells[2]), typed))
    return found


def told(job: str, **instead: str) -> list[list[str]]:
    """Return the words that the table has people type, with theirs in place of the page's.

    Args:
        job: its first column.
        instead: ``address``, ``user``, ``folder`` or ``repository`` of whoever types.
    """
    names = {
        "address": "192.168.1.21", "user": "nvidia", "folder": "~/sparks",
        "repository": "Qwen/Qwen3-4B",
    }  # fmt: skip
    [lines] = [one.typed for one in jobs() if one.name == job]
    for name, mine in instead.items():
        assert names[name] in " ".join(lines), f"the page names no {name} for {job}"
        lines = tuple(line.replace(names[name], mine) for line in lines)
    return [shlex.split(line)[1:] for line in lines]


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

    @contextmanager
    def goes_on_with(self, *words: str) -> Iterator[None]:
        """Leave ``spark-deploy`` running in another terminal during a block, then press Ctrl-C."""
        self.commands.append(list(words))
        process = subprocess.Popen(
            [sys.executable, "-m", "spark_deploy", *words],
            cwd=self.folder, env={**os.environ, **self.env}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0

    def edits_profile(self, profile: str) -> None:
        """Write another profile into the one file of settings."""
        path = self.folder / "group_vars/all.yml"
        text, found = re.subn(r"^profile: \S+", f"profile: {profile}", path.read_text(), flags=re.M)
        assert found == 1
        path.write_text(text)
        self.edits += 1


def the_world_of_the_lab(folder: Path, inventory: Path) -> None:
    """Say what is otherwise in the lab than in the world: hub, registry, packages, time limits.

    No choice of an owner: they are in group_vars/all.yml.
    """
    done = subprocess.run(
        [sys.executable, "-c", SEEN, str(inventory)],
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
