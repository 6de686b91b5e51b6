"""Pictures on the pages exist, are used, and show the recorded output."""

from __future__ import annotations

import html
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
