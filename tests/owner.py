"""A user who follows the pages, with a folder and a terminal, connected to the lab."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.labkit import CHECKOUT, Site, info

COMMANDS_OF_TASK = {
    "first server": (
        "spark-deploy init ~/sparks --host spark-1=192.168.1.21 --user nvidia", "spark-deploy up",
    ),
    "connect through an SSH tunnel": (
        "spark-deploy connect spark-1 --tunnel", 'eval "$(spark-deploy connect spark-1 --for env)"',
    ),
    "switch model or profile": ("spark-deploy up",),
    "roll back": ("spark-deploy rollback",),
    "switch by time of day": ("spark-deploy up",),
    "add a model": ("spark-deploy add Qwen/Qwen3-4B --use", "spark-deploy up"),
    "see why a server is slow": ("spark-deploy top",),
    "see why a server is down": ("spark-deploy status",),
    "measure speed": ("spark-deploy bench",),
    "free the GPU": ("spark-deploy stop --for 1h",),
    "uninstall": ("spark-deploy uninstall",),
    "revoke access": ("spark-deploy uninstall --access",),
}  # fmt: skip
LAB_SETTINGS = """
import json, runpy, sys
import spark_deploy.inventory as inventory
seen = {}
inventory.group_from = lambda *words, **more: seen.update(more["generated"]) or ([], {})
runpy.run_path(sys.argv[1])
print(json.dumps(seen))
"""


def typed_commands(job: str, **instead: str) -> list[list[str]]:
    """Return the commands of a task, with values replaced.

    Args:
        job: the task.
        instead: the ``address``, ``user``, ``folder`` or ``repository`` to use.
    """
    names = {
        "address": "192.168.1.21", "user": "nvidia", "folder": "~/sparks",
        "repository": "Qwen/Qwen3-4B",
    }  # fmt: skip
    lines = COMMANDS_OF_TASK[job]
    for name, value in instead.items():
        assert names[name] in " ".join(lines), f"no {name} in the commands of {job}"
        lines = tuple(line.replace(names[name], value) for line in lines)
    return [shlex.split(line)[1:] for line in lines]


@dataclass
class Owner:
    folder: Path
    env: dict[str, str]
    commands: list[list[str]] = field(default_factory=list)
    edits: int = 0

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(arguments))
        result = subprocess.run(
            [sys.executable, "-m", "spark_deploy", *arguments],
            cwd=cwd or self.folder, env={**os.environ, **self.env}, text=True,
            capture_output=True, stdin=subprocess.DEVNULL, timeout=900, check=False,
        )  # fmt: skip
        sys.stdout.write(f"$ spark-deploy {' '.join(arguments)}\n{result.stdout}{result.stderr}")
        return result

    @contextmanager
    def running(self, *arguments: str) -> Iterator[None]:
        self.commands.append(list(arguments))
        process = subprocess.Popen(
            [sys.executable, "-m", "spark_deploy", *arguments],
            cwd=self.folder, env={**os.environ, **self.env}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0

    def set_profile(self, profile: str) -> None:
        path = self.folder / "group_vars/all.yml"
        text, count = re.subn(r"^profile: \S+", f"profile: {profile}", path.read_text(), flags=re.M)
        assert count == 1
        path.write_text(text)
        self.edits += 1


def new_owner(root: Path, name: str) -> tuple[Owner, list[str]]:
    """Run the documented ``init`` for a new guest; return the owner and the words of ``up``."""
    about = next(guest for guest in info()["guests"] if guest["name"] == name)
    env = {"XDG_CACHE_HOME": str(root / "cache")}
    answers = {"PASSWORD": about["password"], "HOST_KEYS": f"{about['ip']} {about['host_key']}"}
    for question, answer in answers.items():
        env[f"SPARK_BOOTSTRAP_{question}_FILE"] = str(root / question)
        (root / question).touch(mode=0o600)
        (root / question).write_text(f"{answer}\n")
    cache = Path.home() / ".cache/spark-deploy"
    if cache.is_dir():
        shutil.copytree(cache, root / "cache/spark-deploy", ignore_dangling_symlinks=True)
    owner = Owner(root / "own", env)
    user = info()["ssh"]["user"]
    init, up = typed_commands("first server", address=about["ip"], user=user, folder="own")
    result = owner.run(*init, "--model", "lab-stub", cwd=root)
    assert result.returncode == 0, result.stderr
    site = Site(root / "lab", hosts=[name])
    write_lab_settings(owner.folder, site.root / "inventory/lab.py")
    return owner, up


def write_lab_settings(folder: Path, inventory: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LAB_SETTINGS, str(inventory)],
        capture_output=True, text=True, check=True, cwd=CHECKOUT,
    )  # fmt: skip
    generated = json.loads(result.stdout)
    settings = yaml.safe_load((CHECKOUT / "group_vars/lab.yml").read_text())
    merged = {**settings, **generated}
    for chosen in ("model", "profile", "lock_file"):
        merged.pop(chosen, None)
    merged["docker"] = {**settings.get("docker", {}), **generated["docker"]}
    merged["ssh"].pop("user")
    (folder / "group_vars/spark.yml").write_text(yaml.safe_dump(merged, sort_keys=False))
