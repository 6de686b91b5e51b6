"""Record commands in the virtual lab and draw the recording (`make recording`; root).

asciinema records the terminal. termtosvg-ng draws ``first.svg`` from ``first.cast``, which plays
faster than it was recorded.
"""

import argparse
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "files/contract")]

from lab import demo, lifecycle  # noqa: E402
from lab.paths import guest_names, lab_paths  # noqa: E402
from tests.owner import write_lab_settings  # noqa: E402

FILM = CHECKOUT / "docs/recording"
SCREENS = CHECKOUT / "docs/screens/recorded"
COLUMNS, ROWS = 96, 24
REDRAWS_S, LONGEST_PAUSE_S = 7, 1.5  # film time of all progress displays; of other output
FRAME_MS = 150
SHARED_PORT = 8008
# This template upsets the model: its answers are wrong.
TEMPLATE = "templates/mine.jinja"
BAD_TEMPLATE = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONG = {
    "model": "lab-model", "stream": True, "max_tokens": 400, "ignore_eos": True,
    "messages": [{"role": "user", "content": "Write a long story."}],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("guests", nargs="*", default=["lab-1", "lab-2"])
    options = parser.parse_args()
    if options.scene:
        return scene(options.scene, options.guests)
    with tempfile.TemporaryDirectory(prefix="spark-film-") as folder:
        record(Path(folder) / "sparks", guest_names(options.guests))
    tool = ["termtosvg-ng", "render", str(FILM / "first.cast"), str(FILM / "first.svg")]
    subprocess.run([*tool, "-m", str(FRAME_MS), "-D", "4000", "-t", "window_frame"], check=True)
    command = [sys.executable, str(CHECKOUT / "tools/docs/generate.py")]
    return subprocess.run(command, check=False).returncode


def record(folder: Path, names: list[str]) -> None:
    paths = lab_paths()
    lifecycle.up(paths, names, fresh=True, bootstrap=frozenset(), engine="cpu")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    guests = json.loads(paths.record.read_text())["guests"]
    guests = [guest for guest in guests if guest["name"] in names]
    words = ["--user", guests[0]["user"], "--model", "lab-tiny"]
    for place, guest in enumerate(guests, 1):
        words += ["--host", f"spark-{place}={guest['ip']}"]
    (folder / "group_vars").mkdir(parents=True)
    (folder / "key").write_text(f"{secrets.token_hex(16)}\n")
    write_lab_settings(folder, CHECKOUT / "inventory/lab.py")
    path = folder / "group_vars/spark.yml"
    settings = yaml.safe_load(path.read_text())
    settings["replicas"] = {"hosts": [f"spark-{place}" for place in range(1, len(guests) + 1)]}
    settings["serve"] |= {"expose": "lan", "api_key": {"file": str(folder / "key")}}
    path.write_text(yaml.safe_dump(settings))
    raw = folder / "raw.cast"
    inner = [sys.executable, __file__, "--scene", str(folder), "--", *words]
    size = ["--cols", str(COLUMNS), "--rows", str(ROWS), "--overwrite", "-q"]
    argv = ["asciinema", "rec", *size, "-t", "dgx-spark-deploy", "-c", shlex.join(inner), str(raw)]
    subprocess.run(argv, check=True)
    if not (folder / "good").exists():
        raise SystemExit(f"the scene failed:\n{raw.read_text()[-6000:]}")
    FILM.mkdir(exist_ok=True)
    film = "\n".join(_speed_up(_without_paths(raw.read_text(), folder).splitlines()))
    (FILM / "first.cast").write_text(f"{film}\n")
    for file in (folder / "recorded").iterdir():
        (SCREENS / file.name).write_text(_without_paths(file.read_text(), folder))


def _without_paths(text: str, folder: Path) -> str:
    text = text.replace(f"{CHECKOUT}/.venv/bin/", "").replace(str(folder), "~/sparks")
    return text.replace(str(CHECKOUT), "~/dgx-spark-deploy")


def _speed_up(lines: list[str]) -> Iterator[str]:
    """Yield the recording with progress displays in REDRAWS_S, and other pauses cut."""
    head: dict[str, Any] = json.loads(lines[0])
    kept = {key: head[key] for key in ("version", "width", "height", "title")}
    yield json.dumps({**kept, "env": {"TERM": "xterm-256color"}})
    events = [json.loads(line) for line in lines[1:]]
    times = [0.0, *(at_s for at_s, *_ in events)]
    pauses = [at_s - before_s for before_s, at_s in itertools.pairwise(times)]
    redrawn = [_ANSI.sub("", text).startswith("\r") for _, _, text in events]
    faster = sum(itertools.compress(pauses, redrawn)) / REDRAWS_S
    shown_s, before = 0.0, ""
    for (_, kind, text), pause_s, is_redrawn in zip(events, pauses, redrawn, strict=True):
        shown_s += pause_s / faster if is_redrawn else min(pause_s, LONGEST_PAUSE_S)
        if not is_redrawn or text != before:
            yield json.dumps([round(shown_s, 3), kind, text])
        before = text


def scene(folder: Path, init: list[str]) -> int:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = folder / "recorded"
    kept.mkdir()
    _comment("# virtual hosts, vLLM on a CPU, a tiny model; waiting is played faster")
    good = _type("init", str(folder), *init) == 0
    os.chdir(folder)
    good &= _type("up", "-y") == 0
    shutil.copy(folder / "cache/spark-deploy/up.log", kept)
    _type("ask", demo.QUESTION, "spark-1")
    (kept / "status.json").write_text(_output_of("status", "--json"))
    login = _login()
    with _load(login):
        (kept / "top.json").write_text(_output_of("top", "--once", "--json"))
    (kept / "dry.json").write_text(_output_of("up", "--dry", "--json", "--profile", "agent"))
    _comment("# a chat template that spoils answers; a client keeps sending requests")
    (folder / TEMPLATE).parent.mkdir()
    (folder / TEMPLATE).write_text(BAD_TEMPLATE)
    with demo.keep_asking(login, SHARED_PORT) as answers:
        good &= _type("up", "-y", "--data", f"engine.chat_template={TEMPLATE}") != 0
    _comment(f"# answers to the client: {demo.count_answers(answers)}")
    good &= _type("status") == 0
    if good and set(answers) <= {demo.RIGHT, demo.RETRY}:
        (folder / "good").touch()
    return 0


def _login() -> list[str]:
    words = shlex.split(json.loads(_output_of("connect", "--json"))[0]["read_key"])
    return words[: words.index("sudo")] if "sudo" in words else words[:-1]


@contextmanager
def _load(login: list[str]) -> Iterator[None]:
    request = (
        "sudo sed 's/.*/header = \"Authorization: Bearer &\"/' /etc/spark/api-key | "
        "curl -s -N -m 60 -K - -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(_LONG))} http://127.0.0.1:8000/v1/chat/completions"
    )
    script = f"for turn in 1 2 3 4; do {request}; done"
    clients = [
        subprocess.Popen([*login, script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for _ in range(3)
    ]
    time.sleep(3)
    yield
    for client in clients:
        client.terminate()
        client.wait()


def _command() -> list[str]:
    return [sys.executable, "-m", "spark_deploy"]


def _comment(text: str) -> None:
    _write(f"\x1b[2m{text}\x1b[0m\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _type(*words: str) -> int:
    _write(f"\x1b[1m$\x1b[0m spark-deploy {shlex.join(words)}\n")
    time.sleep(1)
    done = subprocess.run([*_command(), *words], stdin=subprocess.DEVNULL, check=False)
    _write("\n")
    time.sleep(LONGEST_PAUSE_S)
    return done.returncode


def _output_of(*words: str) -> str:
    """Return the JSON output of a command; ``status`` may exit with 1."""
    done = subprocess.run([*_command(), *words], capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
