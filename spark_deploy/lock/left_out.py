"""Files of repositories that are not fetched: reading or importing them runs what they hold.

The engine needs safetensors, JSON and texts. What else a repository holds is left on the hub, so
that no later option, library or hand on the host can run it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from spark_deploy.config.errors import LockError
from spark_deploy.lock.types import SourceFile

_PICKLE = "reading it can run code (pickle)"
_CODE = "is code"
_PICKLES = (
    *("bin", "ckpt", "dill", "h5", "joblib", "keras", "mar", "nemo", "npy", "npz"),
    *("pickle", "pkl", "pt", "pt2", "pth", "t7"),
)
_PROGRAMS = (
    *("bash", "dll", "dylib", "exe", "ipynb", "jar", "js"),
    *("py", "pyc", "pyd", "pyo", "pyz", "sh", "so", "whl"),
)
_WHY = {**dict.fromkeys(_PICKLES, _PICKLE), **dict.fromkeys(_PROGRAMS, _CODE)}


def why_left_out(path: str) -> str | None:
    """Return why a file is not fetched; ``None``: it is."""
    # A library's version may follow: libx.so.1
    suffixes = [one.lower() for one in PurePosixPath(path).suffixes]
    if ".so" in suffixes:
        return _CODE
    return _WHY.get(suffixes[-1].removeprefix(".")) if suffixes else None


def parted(
    where: str, files: Iterable[SourceFile]
) -> tuple[tuple[SourceFile, ...], dict[str, str]]:
    """Return what is fetched of ``files``, and why the others are not, by path.

    Raises:
        LockError: The weights are among the others, and nowhere else.
    """
    kept, left = [], {}
    for file in files:
        why = why_left_out(file.path)
        if why is None:
            kept.append(file)
        else:
            left[file.path] = why
    pickles = [path for path, why in left.items() if why == _PICKLE]
    if pickles and not any(file.path.endswith(".safetensors") for file in kept):
        what = f"its weights are in pickle files only ({pickles[0]}), and those are not fetched"
        raise LockError.one(where, what, "name a repository that holds them as safetensors")
    return tuple(kept), left
