from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labkit import SPARE, Site, guest_named, lab
from tests.runs import Run

GUEST = SPARE[0]

PACKAGES = "Base | Install packages"
DIRECTORIES = "Base | Create directories"
SLEEP = "Base | Disable sleep"
LOGIN = "Base | Guarantee memory to the login"
CUDA_REPOSITORY = "CUDA | Add package repositories"
CUDA_TOOLKIT = "CUDA | Install the toolkit"
ENGINE = "Docker | Install engine and NVIDIA toolkit"
DAEMON_JSON = "Docker | Merge daemon.json"
RUNNING = "Docker | Run Docker with our daemon.json settings"
PROOF = "Docker | Check the GPU in a container"


class Prepared:
    def __init__(self, root: Path):
        lab("up", GUEST, "--fresh")
        self.site = Site(root, hosts=[GUEST])
        self.site.choose(model="lab-stub", profile="v2", takeover=[])
        self.guest = guest_named(GUEST)
        self.installed = self.guest.run("dpkg-query -W -f '${Package} ${Version}\\n'")
        self.first = self.run()

    def run(self, *, dry: bool = False) -> Run:
        return self.site.deploy(deploy="deploys/prepare.py", dry=dry)

    def image(self) -> str:
        return self.guest.run("docker images -q | head -n 1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    host = Prepared(tmp_path_factory.mktemp("site"))
    host.first.assert_succeeded()
    yield host
    lab("down", GUEST)
