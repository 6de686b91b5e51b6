from pathlib import Path

import pytest

from lab.model import build


@pytest.fixture(scope="package")
def hub(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    build.build(out, trained=False)
    return out


def newest(hub: Path, name: str) -> Path:
    return hub / name / (hub / name / "refs/main").read_text().strip()


@pytest.fixture(scope="package")
def int4(hub) -> Path:
    return newest(hub, "lab/tiny-int4")


@pytest.fixture(scope="package")
def fp8(hub) -> Path:
    return newest(hub, "lab/tiny-fp8")
