"""Build a wheel that carries the checkout's files for deploys in ``spark_deploy/_checkout``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("catalog", "schema", "roles", "deploys", "files")
FILES = ("group_vars/all.yml", "deploy.py", "config.py")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "dist")


class WithCheckout(build_py):
    """Copies these parts into the package."""

    def run(self) -> None:
        """Build and copy; an editable install uses the checkout."""
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # files of earlier builds
        super().run()
        source, target = Path(__file__).parent, Path(self.build_lib) / "spark_deploy" / "_checkout"
        for name in FOLDERS:
            shutil.copytree(source / name, target / name, ignore=LEFT_OUT)
        for name in FILES:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def long_description() -> str:
    """Return README.md without relative links, which package indexes cannot follow."""
    text = Path(__file__).with_name("README.md").read_text("utf-8").partition("\n## More\n")[0]
    link = r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)"
    text = re.sub(rf"^(?:> )?{link}\n", "", text, flags=re.MULTILINE)
    return re.sub(link, r"\1", text)


setup(
    cmdclass={"build_py": WithCheckout},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
