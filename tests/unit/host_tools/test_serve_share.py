"""Peer downloads from a real nginx on 127.0.0.1."""

from __future__ import annotations

import http.client
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from spark_contract.documents import text_of
from spark_contract.errors import HostToolError
from spark_contract.fetching import SHARE_SETTINGS, Share, SharedTree, growing_tree
from spark_host.gateway import nginx
from stub_gateway import becomes, free_port
from stub_host import Host

FETCHED, BUILT = "a" * 64, "b" * 64
KEY = "key-of-this-run-1234"


@dataclass
class Lender:
    root: Path
    port: int

    def ask(
        self, path: str, key: str | None = KEY, method: str = "GET", **headers: str
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def write(self, path: str, text: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


@pytest.fixture
def lender(host: Host, nginx_program: Path, tmp_path: Path) -> Iterator[Lender]:
    root = host.paths.root
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/nginx").symlink_to(nginx_program)
    trees = (
        SharedTree(FETCHED, "/srv/sources/x-1", "0123456789ab", unfinished=True),
        SharedTree(BUILT, "/srv/models/y-1", "ba9876543210", unfinished=False),
    )
    made = Lender(root, free_port())
    made.write(SHARE_SETTINGS, text_of(Share("127.0.0.1", made.port, trees)))
    given, run = tmp_path / "given", tmp_path / "run"
    given.mkdir()
    run.mkdir()
    (given / "key").write_text(f"{KEY}\n")
    lend = becomes(
        lambda: nginx.share(host.paths),
        RUNTIME_DIRECTORY=str(run),
        CREDENTIALS_DIRECTORY=str(given),
    )
    process = subprocess.Popen(lend)
    try:
        _wait(made)
        yield made
    finally:
        process.terminate()
        process.wait(10)


def _wait(lender: Lender) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            lender.ask("/")
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_serves_checkpoint_files_and_ranges(lender: Lender) -> None:
    lender.write("/srv/sources/x-1/sub/a file", "0123456789")
    assert lender.ask(f"/{FETCHED}/files/sub/a%20file") == (200, b"0123456789")
    assert lender.ask(f"/{FETCHED}/files/sub/a%20file", Range="bytes=3-4") == (206, b"34")


def test_serves_verified_files_of_a_running_download(lender: Lender) -> None:
    growing = growing_tree(Path("/srv/sources/x-1"))
    lender.write(f"{growing}/one", "proven")
    lender.write(f"{growing.parent}/parts/two.part", "half")
    lender.write("/var/lib/spark/jobs/0123456789ab/progress", "progress phase=fetch bytes=6")
    assert lender.ask(f"/{FETCHED}/files/one") == (200, b"proven")
    assert lender.ask(f"/{FETCHED}/progress") == (200, b"progress phase=fetch bytes=6")
    assert lender.ask(f"/{FETCHED}/files/../parts/two.part")[0] == 404
    assert lender.ask(f"/{FETCHED}/files/parts/two.part")[0] == 404


def test_serves_no_files_of_a_running_build(lender: Lender) -> None:
    lender.write(f"{growing_tree(Path('/srv/models/y-1'))}/one", "half")
    assert lender.ask(f"/{BUILT}/files/one")[0] == 404
    lender.write("/srv/models/y-1/one", "whole")
    assert lender.ask(f"/{BUILT}/files/one") == (200, b"whole")


@pytest.mark.parametrize("key", [None, "", "wrong", KEY[:-1], f"{KEY}x", KEY.upper()])
def test_peer_download_needs_the_key(lender: Lender, key: str | None) -> None:
    lender.write("/srv/models/y-1/one", "whole")
    for path in (f"/{BUILT}/files/one", f"/{FETCHED}/progress", "/"):
        assert lender.ask(path, key)[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        "/", "/etc/passwd", "/etc/spark/share.json", "/srv/models/y-1/one",
        f"/{BUILT}/files/../../etc/spark/share.json", f"/{BUILT}/files/%2e%2e/%2e%2e/etc/passwd",
        f"/{BUILT}/files/", f"/{'c' * 64}/files/one",
    ],
)  # fmt: skip
def test_no_other_file_is_served(lender: Lender, path: str) -> None:
    lender.write("/srv/models/y-1/one", "whole")
    assert lender.ask(path)[0] in (400, 404)


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "MKCOL"])
def test_peer_download_is_read_only(lender: Lender, method: str) -> None:
    lender.write("/srv/models/y-1/one", "whole")
    assert lender.ask(f"/{BUILT}/files/one", method=method)[0] == 405
    assert lender.ask(f"/{BUILT}/files/one") == (200, b"whole")


def test_refuses_paths_that_nginx_would_interpret(host: Host) -> None:
    tree = SharedTree(BUILT, '/srv/"; return 200; #', "ba9876543210", unfinished=False)
    with pytest.raises(HostToolError, match="plainer path"):
        nginx.share_text(Share("::1", 1, (tree,)), Path("/run/x"), host.paths)
