import http.client
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from gateway_client import free_port, read_exec_command
from spark_contract.documents import to_json
from spark_contract.fetching import SHARE_SETTINGS, Share, SharedTree, partial_tree
from spark_contract.tool import HostToolError
from spark_host.gateway import nginx
from stub_host import connect_when_listening

FETCHED, BUILT = "a" * 64, "b" * 64
KEY = "key-of-this-run-1234"


@dataclass
class Peer:
    root: Path
    port: int

    def ask(self, path, key=KEY, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            return answer.status, answer.read()

    def write(self, path, text):
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def peer(nginx_host, tmp_path):
    peer = Peer(nginx_host.paths.root, free_port())
    trees = (
        SharedTree(FETCHED, "/srv/sources/x-1", "0123456789ab", unfinished=True),
        SharedTree(BUILT, "/srv/models/y-1", "ba9876543210", unfinished=False),
    )
    peer.write(SHARE_SETTINGS, to_json(Share("127.0.0.1", peer.port, trees)))
    peer.write("/srv/models/y-1/file", "built")
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "run").mkdir()
    folders = {"RUNTIME_DIRECTORY": f"{tmp_path}/run", "CREDENTIALS_DIRECTORY": str(tmp_path)}
    command = read_exec_command(lambda: nginx.share(nginx_host.paths), **folders)
    with subprocess.Popen(command) as process:
        connect_when_listening(peer.port).close()
        yield peer
        process.terminate()


def test_serves_checkpoint_files_and_ranges(peer):
    peer.write("/srv/sources/x-1/sub/a file", "0123456789")
    path = f"/{FETCHED}/files/sub/a%20file"
    assert peer.ask(path) == (200, b"0123456789")
    assert peer.ask(path, Range="bytes=3-4") == (206, b"34")


def test_serves_only_verified_files_of_a_running_download(peer):
    growing = partial_tree(Path("/srv/sources/x-1"))
    peer.write(f"{growing}/verified", "whole")
    peer.write(f"{growing.parent}/parts/two.part", "half")
    peer.write("/var/lib/spark/jobs/0123456789ab/progress", "phase=fetch bytes=6")
    assert peer.ask(f"/{FETCHED}/files/verified") == (200, b"whole")
    assert peer.ask(f"/{FETCHED}/progress") == (200, b"phase=fetch bytes=6")
    assert peer.ask(f"/{FETCHED}/files/../parts/two.part")[0] == 404
    assert peer.ask(f"/{FETCHED}/files/parts/two.part")[0] == 404
    peer.write(f"{partial_tree(Path('/srv/models/y-1'))}/growing", "of a build")
    assert peer.ask(f"/{BUILT}/files/growing")[0] == 404


def test_follows_symbolic_links_only_to_the_models_folder(peer):
    (peer.root / "srv/models").rename(peer.root / "srv/disk")
    (peer.root / "srv/models").symlink_to("disk")
    assert peer.ask(f"/{BUILT}/files/file") == (200, b"built")
    (peer.root / "srv/models/y-1/link").symlink_to("file")
    (peer.root / "srv/models/y-1/folder").symlink_to("/etc")
    for name in ("link", "folder/passwd"):
        assert peer.ask(f"/{BUILT}/files/{name}")[0] in (403, 404)


@pytest.mark.parametrize("key", [None, "", "wrong", KEY[:-1], f"{KEY}x", KEY.upper()])
def test_peer_server_requires_the_key(peer, key):
    for path in (f"/{BUILT}/files/file", f"/{FETCHED}/progress", "/"):
        assert peer.ask(path, key)[0] == 401


@pytest.mark.parametrize(
    "path",
    [
        "/", "/etc/passwd", "/etc/spark/share.json", "/srv/models/y-1/file",
        f"/{BUILT}/files/../../etc/spark/share.json", f"/{BUILT}/files/%2e%2e/%2e%2e/etc/passwd",
        f"/{BUILT}/files/", f"/{'c' * 64}/files/file",
    ],
)  # fmt: skip
def test_peer_server_serves_only_shared_files(peer, path):
    assert peer.ask(path)[0] in (400, 404)


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "MKCOL"])
def test_peer_server_rejects_writes(peer, method):
    assert peer.ask(f"/{BUILT}/files/file", method=method)[0] == 405
    assert peer.ask(f"/{BUILT}/files/file") == (200, b"built")


def test_rejects_paths_that_nginx_would_interpret(host):
    tree = SharedTree(BUILT, '/srv/"; return 200; #', "ba9876543210", unfinished=False)
    with pytest.raises(HostToolError, match="cannot share"):
        nginx.render_share(Share("::1", 1, (tree,)), Path("/run/x"), host.paths)
