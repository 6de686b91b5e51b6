"""A full disk loses no record, and keeps no server from coming up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spark_serve import files
from stub_host import REPOSITORY

# A limit on the size of files cuts a write short without an error, as a disk that is nearly full
# does. In a process of its own, because it holds for everything that one writes.
_WRITE = """
import resource, signal, sys
from pathlib import Path
from spark_serve import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
files.write_json(Path(sys.argv[1]), {"release": "main-cccccccccccc", "previous": ["b"] * 20})
"""


def test_a_record_that_does_not_fit_any_more_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    files.write_json(path, {"release": "main-aaaaaaaaaaaa", "previous": ["b"] * 20})

    said = subprocess.run(
        [sys.executable, "-c", _WRITE, str(path)],
        capture_output=True, text=True, check=False, cwd=REPOSITORY / "files/serve",
    )  # fmt: skip

    assert f"File too large: '{path}'" in said.stderr
    found = files.read_json(path)
    assert found is not None
    assert found["release"] == "main-aaaaaaaaaaaa"
    assert list(tmp_path.iterdir()) == [path]
