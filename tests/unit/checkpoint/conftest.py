import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "files/contract"), str(ROOT / "files/checkpoint")]
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
from builder_hub import REPOSITORY, Hub, fetch_order  # noqa: E402
from builder_trees import Workshop  # noqa: E402


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def source(hub):
    directory = hub.root / REPOSITORY
    (directory / "sub").mkdir(parents=True)
    for number, size in enumerate((300_000, 2_500_000, 0, 17)):
        (directory / f"file-{number}.bin").write_bytes(os.urandom(size))
    (directory / "sub" / "a file.json").write_text("{}")
    return directory


@pytest.fixture
def order(hub, source, tmp_path):
    def write(**changes):
        path = tmp_path / "fetch.json"
        defaults = {"out": tmp_path / "out", "urls": [f"{hub.url}/{REPOSITORY}/"]}
        path.write_text(json.dumps(fetch_order(source, **{**defaults, **changes})))
        return path

    return write
