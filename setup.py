"""What pyproject.toml cannot say: a wheel carries the parts of the checkout that a deploy needs.

``spark_deploy/config/checkout.py`` finds them in ``spark_deploy/_checkout``, laid out as here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("catalog", "schema", "roles", "deploys", "files")
FILES = ("group_vars/all.yml", "deploy.py", "config.py")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "dist")


class WithCheckout(build_py):
    """Copies what is carried beside the package's modules."""

    def run(self) -> None:
        """Build as always, and copy; an editable install has the checkout itself."""
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # what earlier builds left is not ours
        super().run()
        here, into = Path(__file__).parent, Path(self.build_lib) / "spark_deploy" / "_checkout"
        for name in FOLDERS:
            shutil.copytree(here / name, into / name, ignore=LEFT_OUT)
        for name in FILES:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here / name, into / name)


setup(cmdclass={"build_py": WithCheckout})
