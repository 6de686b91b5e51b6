import re

from spark_deploy.config.checkout import CHECKOUT

PAGES = [CHECKOUT / "README.md", *CHECKOUT.glob("docs/**/*.md")]


def test_pictures_exist_and_are_used():
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
