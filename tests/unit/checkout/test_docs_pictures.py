"""Pictures on the pages exist, are used, and show the recorded output."""

from __future__ import annotations

import html
import json
import re
import runpy

from spark_deploy.config.checkout import CHECKOUT

PAGES = [CHECKOUT / "README.md", *CHECKOUT.glob("docs/**/*.md")]


def test_pictures_exist_and_are_used() -> None:
    shown = {
        (page.parent / picture).resolve()
        for page in PAGES
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", page.read_text("utf-8"))
    }
    drawn = {
        path.resolve()
        for folder in ("screens", "recording")
        for path in (CHECKOUT / "docs" / folder).glob("*.svg")
    }
    assert shown == drawn


def test_pictures_match_recorded_output() -> None:
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


def test_recording_shows_deploy_switch_and_rollback() -> None:
    recording = CHECKOUT / "docs/recording/first.cast"
    head, *events = map(json.loads, recording.read_text("utf-8").splitlines())
    assert (head["version"], head["width"]) == (2, 96)
    output = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(text for _, _, text in events))
    typed = re.findall(r"^\$ spark-deploy (.+?)\r?$", output, re.M)
    assert [line.split()[0] for line in typed] == ["up", "top", "use", "up", "up", "status"]
    assert "serves lab-stub with profile v2 as lab-model at http" in output
    result = output.rpartition("# the client was told: ")[2].splitlines()[0]
    assert re.fullmatch(r"\d+ x right(, \d+ x come back later)?(, \d+ x right)?", result)
    assert events[-1][0] < 120, "the recording is too long"
    drawn = recording.with_suffix(".svg").read_text("utf-8")
    assert "@keyframes" in drawn or "<animate" in drawn
