"""Commands on the pages are commands: the program takes them, and the deploys are there."""

from __future__ import annotations

import html
import json
import re
import runpy
import shlex
from collections.abc import Iterator

import click
import pytest

from spark_deploy.cli import COMMANDS, GROUP
from spark_deploy.config.checkout import CHECKOUT

_DOCS = CHECKOUT.glob("docs/**/*.md")
PAGES = sorted([CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *_DOCS])
# In code, in a block or in a line; to its end, to a comment, to what the shell does with it.
_SAID = re.compile(
    r"(?:^|[`\s(])spark-deploy ([a-z][a-z-]+(?:'[^'\n]*'|[^`\n#;|&>)\"'])*)", re.MULTILINE
)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def typed() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for code in _CODE.findall(page.read_text("utf-8")):
            for said in _SAID.findall(code):
                yield page.name, said.strip().rstrip(",")


TYPED = sorted(set(typed()))


def test_pages_show_many_commands():
    assert len(TYPED) > 40
    named = {said.split()[0] for _, said in TYPED}
    assert {"init", "up", "plan", "status", "rollback", "connect"} <= named


@pytest.mark.parametrize(("page", "said"), TYPED, ids=lambda text: text.replace(" ", "_"))
def test_commands_on_pages_exist(page, said):
    name, *words = shlex.split(said, comments=True)
    assert name in COMMANDS, f"{page}: {name}"
    command = GROUP.get_command(click.Context(GROUP), name)
    assert command is not None
    if not words:
        return  # the name alone, as in a sentence
    try:
        command.make_context(name, [word.strip("[]") for word in words])
    except click.exceptions.Exit:  # --help
        pass
    except click.UsageError as error:
        pytest.fail(f"{page}: spark-deploy {said}: {error.message}")


def test_deploys_on_pages_exist():
    named = {
        (page.name, found)
        for page in PAGES
        for found in re.findall(r"\bdeploys/[a-z_]+\.py", page.read_text("utf-8"))
    }
    assert len({found for _, found in named}) >= 5
    assert [one for one in named if not (CHECKOUT / one[1]).is_file()] == []


def test_pictures_exist_and_are_used():
    shown = {
        (page.parent / found).resolve()
        for page in PAGES
        for found in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", page.read_text("utf-8"))
    }
    drawn = {
        path.resolve()
        for folder in ("screens", "recording")
        for path in (CHECKOUT / "docs" / folder).glob("*.svg")
    }
    assert shown - drawn == set()
    assert drawn - shown == set()


def test_pictures_match_recorded_output():
    screens = runpy.run_path(str(CHECKOUT / "tools/docs/screens.py"), run_name="screens")
    drawn = {
        name: html.unescape(screens["picture"](name, *said)).replace("\xa0", " ")
        for name, said in screens["SCREENS"].items()
    }
    for name, words in {
        "plan": "qwen3.5-122b with v2 fits",
        "up-running": "measuring speed",
        "up": "serves lab-stub with profile v2 as lab-model at",
        "dry": "nothing to download; engine restarts",
        "status": "full check, 16 of 16 passed",
        "top": "running",
    }.items():
        assert words in drawn[name]
    assert set(drawn) == {path.stem for path in (CHECKOUT / "docs/screens").glob("*.svg")}


def test_recording_shows_deploy_switch_and_rollback():
    film = CHECKOUT / "docs/recording/first.cast"
    head, *events = map(json.loads, film.read_text("utf-8").splitlines())
    assert (head["version"], head["width"]) == (2, 96)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(text for _, _, text in events))
    typed = re.findall(r"^\$ spark-deploy (.+?)\r?$", said, re.M)
    assert [line.split()[0] for line in typed] == ["up", "top", "use", "up", "up", "status"]
    assert "serves lab-stub with profile v2 as lab-model at http" in said
    told = said.rpartition("# the client was told: ")[2].splitlines()[0]
    assert re.fullmatch(r"\d+ x right(, \d+ x come back later)?(, \d+ x right)?", told)
    assert events[-1][0] < 120, "nobody watches for longer"
    drawn = film.with_suffix(".svg").read_text("utf-8")
    assert "@keyframes" in drawn or "<animate" in drawn
    assert "docs/recording/first.svg" in (CHECKOUT / "README.md").read_text("utf-8")[:2500]
