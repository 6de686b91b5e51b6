"""A copy of the lab's code in the state directory, which its long-lived processes run from.

A guest's supervisor runs code again at every reboot of the guest: by then the checkout it was
started from may have changed or gone.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lab.content import cached, content_key
from lab.paths import LabPaths

_PACKAGE = Path(__file__).parent


def use_copied_code(paths: LabPaths) -> None:
    sources = sorted([*_PACKAGE.glob("*.py"), *_PACKAGE.glob("hub/*.py")])
    names = [path.relative_to(_PACKAGE).as_posix() for path in sources]
    key = content_key(names, trees=sources)

    def make(target: Path) -> None:
        for path, name in zip(sources, names, strict=True):
            (target / "lab" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / "lab" / name)

    copy = cached(paths.state / "code" / key, make)
    os.environ["PYTHONPATH"] = str(copy)
    os.environ["SPARK_LAB_DIR"] = str(paths.state)
