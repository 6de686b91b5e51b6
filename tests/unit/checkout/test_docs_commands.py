"""Commands and deploys on the pages exist."""

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
# In code blocks or inline code, up to a comment or shell operator.
_SAID = re.compile(
    r"(?:^|[`\s(])spark-deploy ([a-z][a-z-]+(?:'[^'\n]*'|[^`\n#;|&>)\"'])*)", re.MULTILINE
)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def typed() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for code in _CODE.findall(page.read_text("utf-8")):
            for output in _SAID.findall(code):
                yield page.name, output.strip().rstrip(",")


TYPED = sorted(set(typed()))


def test_pages_show_many_commands():
    assert len(TYPED) > 40
    named = {output.split()[0] for _, output in TYPED}
    assert {"init", "up", "plan", "status", "rollback", "connect"} <= named


@pytest.mark.parametrize(("page", "output"), TYPED, ids=lambda text: text.replace(" ", "_"))
def test_commands_on_pages_exist(page, output):
    name, *words = shlex.split(output, comments=True)
    assert name in COMMANDS, f"{page}: {name}"
    command = GROUP.get_command(click.Context(GROUP), name)
    assert command is not None
    if not words:
        return  # only the name, as in a sentence
    try:
        command.make_context(name, [word.strip("[]") for word in words])
    except click.exceptions.Exit:  # --help
        pass
    except click.UsageError as error:
        pytest.fail(f"{page}: spark-deploy {output}: {error.message}")


def test_deploys_on_pages_exist():
    named = {
        (page.name, result)
        for page in PAGES
        for result in re.findall(r"\bdeploys/[a-z_]+\.py", page.read_text("utf-8"))
    }
    assert len({result for _, result in named}) >= 5
    assert [item for item in named if not (CHECKOUT / item[1]).is_file()] == []


def test_pictures_exist_and_are_used():
    shown = {
        (page.parent / result).resolve()
        for page in PAGES
        for result in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", page.read_text("utf-8"))
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
        name: html.unescape(screens["picture"](name, *output)).replace("\xa0", " ")
        for name, output in screens["SCREENS"].items()
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
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(text for _, _, text in events))
    typed = re.findall(r"^\$ spark-deploy (.+?)\r?$", output, re.M)
    assert [line.split()[0] for line in typed] == ["up", "top", "use", "up", "up", "status"]
    assert "serves lab-stub with profile v2 as lab-model at http" in output
    result = output.rpartition("# the client was told: ")[2].splitlines()[0]
    assert re.fullmatch(r"\d+ x right(, \d+ x come back later)?(, \d+ x right)?", result)
    assert events[-1][0] < 120, "the recording is too long"
    drawn = film.with_suffix(".svg").read_text("utf-8")
    assert "@keyframes" in drawn or "<animate" in drawn
    assert "docs/recording/first.svg" in (CHECKOUT / "README.md").read_text("utf-8")[:2500]
