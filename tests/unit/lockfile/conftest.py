from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.lockfile.hub_trees import BASE, DONOR, base_entries, donor_entries, write_repository


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as running:
        write_repository(running.root, BASE, base_entries())
        write_repository(running.root, DONOR, donor_entries())
        yield running
