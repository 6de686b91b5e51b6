import subprocess
import sys

from spark_deploy.checkout import CHECKOUT


def test_the_generated_pages_are_current():
    command = [sys.executable, str(CHECKOUT / "docs/generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_setting_model_and_profile_has_its_page():
    pages = {
        path.stem: path.read_text("utf-8") for path in (CHECKOUT / "docs/reference").glob("*.md")
    }
    for kind in ("models", "profiles"):
        for path in (CHECKOUT / "catalog" / kind).glob("*.yml"):
            assert f"## {path.stem}" in pages[kind]
