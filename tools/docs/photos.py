"""Photograph the pages that a browser shows, into docs/photos (`make photos`; Chromium).

``front.png`` is the front page of the site in build/site, ``bench.png`` the report of a bench that
was recorded in the virtual lab, where a stub stands for the engine: its speed says nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "files/contract")]

from spark_contract.documents import parse  # noqa: E402

from spark_deploy.bench import page  # noqa: E402
from spark_deploy.bench.result import BenchResult  # noqa: E402

OUT = CHECKOUT / "docs/photos"
SIZES = {"front": (1280, 900), "bench": (1000, 1150)}


def main() -> int:
    """Take every photo; returns 1 without a browser or a site."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    front = CHECKOUT / "build/site/index.html"
    if browser is None or not front.is_file():
        sys.stderr.write("needs chromium, and the site: `make site`\n")
        return 1
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="spark-photos-") as folder:
        report = Path(folder) / "bench.html"
        recorded = CHECKOUT / "docs/screens/recorded/bench.json"
        report.write_text(page.page_of([parse(BenchResult, recorded.read_text("utf-8"))]))
        for name, place in (("front", front), ("bench", report)):
            width, height = SIZES[name]
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            flags += [f"--window-size={width},{height}", f"--screenshot={OUT / name}.png"]
            argv = [browser, *flags, place.as_uri()]
            subprocess.run(argv, check=True, capture_output=True, timeout=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
