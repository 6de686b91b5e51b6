"""Record commands in the virtual lab and draw the recording (`make recording`; root).

asciinema records the terminal; pauses are cut. termtosvg-ng draws ``first.svg`` from
``first.cast``, which plays faster than it was recorded.
"""

from __future__ import annotations

import argparse
import json
import os
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
FASTER, LONGEST_PAUSE_S = 6, 1.5
FRAME_MS = 150
# Delay of the stand-in between pieces of an answer: keeps requests visible.
PIECE_S = "0.02"
_LONG = {
    "model": "lab-model", "stream": True, "max_tokens": 400, "ignore_eos": True,
    "messages": [{"role": "user", "content": "Write a long story."}],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw the existing recording again")
    parser.add_argument("--scene", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("guests", nargs="*", default=["lab-1", "lab-2"])
    options = parser.parse_args()
    if options.scene:
        return scene(options.scene)
    if not options.draw:
        with tempfile.TemporaryDirectory(prefix="spark-film-") as folder:
            record(Path(folder) / "sparks", guest_names(options.guests))
    tool = ["termtosvg-ng", "render", str(FILM / "first.cast"), str(FILM / "first.svg")]
    subprocess.run([*tool, "-m", str(FRAME_MS), "-D", "4000", "-t", "window_frame"], check=True)
    command = [sys.executable, str(CHECKOUT / "tools/docs/generate.py")]
    return subprocess.run(command, check=False).returncode


def record(folder: Path, names: list[str]) -> None:
    paths = lab_paths()
    lifecycle.up(paths, names, fresh=True, bootstrap=frozenset(), engine="stub")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    guests = json.loads(paths.record.read_text())["guests"]
    guests = [guest for guest in guests if guest["name"] in names]
    hosts = [f"--host=spark-{place}={guest['ip']}" for place, guest in enumerate(guests, 1)]
    words = [*hosts, "--user", guests[0]["user"], "--model", "lab-stub"]
    subprocess.run([*_command(), "init", str(folder), *words], check=True)
    write_lab_settings(folder, CHECKOUT / "inventory/lab.py")
    path = folder / "group_vars/spark.yml"
    settings = yaml.safe_load(path.read_text())
    settings["engine"] = {"environment": {"STUB_PIECE_S": PIECE_S}}
    path.write_text(yaml.safe_dump(settings))
    raw = folder / "raw.cast"
    inner = [sys.executable, __file__, "--scene", str(folder)]
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
    head: dict[str, Any] = json.loads(lines[0])
    kept = {key: head[key] for key in ("version", "width", "height", "title")}
    yield json.dumps({**kept, "env": {"TERM": "xterm-256color"}})
    shown_s = before_s = 0.0
    for line in lines[1:]:
        at_s, kind, text = json.loads(line)
        shown_s += min((at_s - before_s) / FASTER, LONGEST_PAUSE_S)
        before_s = at_s
        yield json.dumps([round(shown_s, 3), kind, text])


def scene(folder: Path) -> int:
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    kept = folder / "recorded"
    kept.mkdir()
    _comment(f"# virtual hosts with a stand-in for the engine; {FASTER} times faster")
    good = _type("up", "-y") == 0
    shutil.copy(folder / "cache/spark-deploy/up.log", kept)
    (kept / "status.json").write_text(_output_of("status", "--json"))
    login = _login()
    with _load(login):
        _type("top", "--once")
        (kept / "top.json").write_text(_output_of("top", "--once", "--json"))
    _type("use", "agent")
    (kept / "dry.json").write_text(_output_of("up", "--dry", "--json"))
    good &= _type("up", "-y") == 0
    _comment("# a broken engine; a client keeps sending requests to spark-1")
    with demo.ask_meanwhile(login) as answers:
        good &= _type("up", "spark-1", "-y", *demo.BAD_RELEASE) != 0
    _comment(f"# answers to the client: {demo.count_answers(answers)}")
    _type("status", "spark-1")
    time.sleep(LONGEST_PAUSE_S * FASTER)
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
    return done.returncode


def _output_of(*words: str) -> str:
    """Return the JSON output of a command; ``status`` may exit with 1."""
    done = subprocess.run([*_command(), *words], capture_output=True, text=True, check=False)
    json.loads(done.stdout)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
