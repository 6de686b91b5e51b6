"""The lab's model hub, asked by the real hub client and by plain HTTP."""

import hashlib
import http.client
import json
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lab.hub.faults import FaultSwitch, HubFault, set_fault
from lab.hub.responses import byte_range, link_refusal, signed_link
from lab.hub.server import Hub, make_servers
from lab.hub.store import Store, commit_id

WEIGHTS = bytes(range(256)) * 4096
CONFIG = b'{"model_type": "tiny"}\n'
FIRST, SECOND = "1" * 40, "2" * 40


class RunningHub:
    def __init__(self, root: Path, run_dir: Path):
        self.root, self.run_dir = root, run_dir
        port, cdn_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.fault_file = run_dir / "hub-fault.json"
        self.access_log = run_dir / "hub-access.jsonl"
        hub = Hub(
            store=Store(root),
            faults=FaultSwitch(self.fault_file),
            cdn_url=f"http://127.0.0.1:{cdn_port}",
            access_log=self.access_log,
        )
        self.servers = make_servers(hub, "127.0.0.1", port, cdn_port)
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def requests(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.access_log.read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def hub(tmp_path):
    repo = tmp_path / "hub/lab/tiny"
    for commit, config in ((FIRST, b"{}\n"), (SECOND, CONFIG)):
        (repo / commit / "sub").mkdir(parents=True)
        (repo / commit / "config.json").write_bytes(config)
        (repo / commit / "sub/notes.txt").write_bytes(b"notes\n")
        (repo / commit / "model-00001-of-00001.safetensors").write_bytes(WEIGHTS)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(SECOND + "\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    running = RunningHub(tmp_path / "hub", run_dir)
    yield running
    running.close()


def get(url, headers=None, method="GET"):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=5)
    connection.request(method, f"{parts.path}?{parts.query}", headers=headers or {})
    answer = connection.getresponse()
    try:
        body = answer.read()
    except http.client.IncompleteRead as error:
        body = error.partial
    connection.close()
    return answer.status, dict(answer.headers), body


def weights_link(hub):
    name = "model-00001-of-00001.safetensors"
    status, headers, _ = get(f"{hub.url}/lab/tiny/resolve/{SECOND}/{name}")
    assert status == 302
    return headers["Location"]


def test_the_client_reads_the_commit_sizes_and_hashes_of_a_model(hub):
    info = HfApi(endpoint=hub.url, token=False).model_info("lab/tiny", files_metadata=True)
    files = {sibling.rfilename: sibling for sibling in info.siblings}
    assert info.sha == SECOND
    assert sorted(files) == ["config.json", "model-00001-of-00001.safetensors", "sub/notes.txt"]
    weights = files["model-00001-of-00001.safetensors"]
    assert (weights.size, weights.lfs.sha256) == (len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    blob = hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG).hexdigest()
    assert (files["config.json"].size, files["config.json"].blob_id) == (len(CONFIG), blob)


def test_the_client_downloads_a_whole_pinned_revision(hub, tmp_path):
    where = snapshot_download(
        "lab/tiny", revision=FIRST, endpoint=hub.url, local_dir=tmp_path / "out", token=False
    )
    assert (Path(where) / "model-00001-of-00001.safetensors").read_bytes() == WEIGHTS
    assert (Path(where) / "config.json").read_bytes() == b"{}\n"


def test_the_client_resolves_main_and_caches_by_hash(hub, tmp_path):
    path = hf_hub_download(
        "lab/tiny", "config.json", endpoint=hub.url, cache_dir=tmp_path / "cache", token=False
    )
    assert Path(path).read_bytes() == CONFIG
    assert SECOND in path


def test_the_client_gets_paths_info_and_the_tree(hub):
    api = HfApi(endpoint=hub.url, token=False)
    found = api.get_paths_info("lab/tiny", ["config.json", "missing"], revision=SECOND)
    assert [entry.path for entry in found] == ["config.json"]
    tree = {entry.path for entry in api.list_repo_tree("lab/tiny", recursive=True)}
    assert "sub/notes.txt" in tree


@pytest.mark.parametrize(
    ("repo", "revision", "path", "error"),
    [
        ("lab/none", None, "config.json", RepositoryNotFoundError),
        ("lab/tiny", "3" * 40, "config.json", RevisionNotFoundError),
        ("lab/tiny", None, "none.json", EntryNotFoundError),
    ],
)
def test_the_client_raises_the_error_that_fits_what_is_missing(
    hub, tmp_path, repo, revision, path, error
):
    with pytest.raises(error):
        hf_hub_download(
            repo, path, revision=revision, endpoint=hub.url, cache_dir=tmp_path, token=False
        )


def test_a_gated_repository_opens_for_its_token_only(hub, tmp_path):
    (hub.root / "lab/tiny/token").write_text("hf_lab\n")
    words = {"repo_id": "lab/tiny", "filename": "model-00001-of-00001.safetensors"}
    with pytest.raises(GatedRepoError):
        hf_hub_download(**words, endpoint=hub.url, cache_dir=tmp_path, token="wrong")
    path = hf_hub_download(**words, endpoint=hub.url, cache_dir=tmp_path, token="hf_lab")
    assert Path(path).read_bytes() == WEIGHTS
    blobs = [line for line in hub.requests() if str(line["path"]).startswith("/blobs/")]
    assert blobs
    assert not any(line["authorized"] for line in blobs)


def test_the_second_host_refuses_the_hubs_token(hub):
    status, _, _ = get(weights_link(hub), {"Authorization": "Bearer hf_lab"})
    assert status == 400


def test_a_range_is_answered_with_exactly_its_bytes(hub):
    status, headers, body = get(weights_link(hub), {"Range": "bytes=100-199"})
    assert (status, body) == (206, WEIGHTS[100:200])
    assert headers["Content-Range"] == f"bytes 100-199/{len(WEIGHTS)}"
    status, headers, _ = get(weights_link(hub), {"Range": f"bytes={len(WEIGHTS)}-"})
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(WEIGHTS)}")


def test_a_small_file_is_a_relative_redirect(hub):
    status, headers, _ = get(f"{hub.url}/lab/tiny/resolve/main/config.json", method="HEAD")
    assert status == 307
    assert headers["Location"].startswith("/api/resolve-cache/")
    assert headers["X-Repo-Commit"] == SECOND


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None), ("bytes=0-9", (0, 9)), ("bytes=90-", (90, 99)), ("bytes=-10", (90, 99)),
        ("bytes=50-500", (50, 99)), ("bytes=0-1,5-6", None), ("lines=1-2", None), ("bytes=-", None),
    ],
)  # fmt: skip
def test_byte_ranges(header, expected):
    assert byte_range(header, 100) == expected


def test_a_signed_link_opens_until_it_expires_and_never_when_altered():
    link = signed_link("http://cdn", "a" * 64, b"secret", 1000)
    assert link_refusal(link, b"secret", 999) is None
    assert link_refusal(link, b"secret", 1001) == "the link has expired"
    later = link.replace("Expires=1000", "Expires=2000")
    assert link_refusal(later, b"secret", 999) == "the signature does not match"
    assert link_refusal("http://cdn/blobs/" + "a" * 64, b"secret", 1) == "the link is not signed"


def test_wrong_hash_changes_one_byte_and_keeps_the_size(hub):
    set_fault(hub.fault_file, HubFault("wrong-hash"))
    _, _, body = get(weights_link(hub))
    assert len(body) == len(WEIGHTS)
    assert sum(a != b for a, b in zip(body, WEIGHTS, strict=True)) == 1


def test_truncate_cuts_the_connection_and_a_resumed_rest_is_right(hub):
    set_fault(hub.fault_file, HubFault("truncate", times=1))
    _, _, body = get(weights_link(hub))
    assert body == WEIGHTS[: len(body)]
    assert 0 < len(body) < len(WEIGHTS)
    _, _, rest = get(weights_link(hub), {"Range": f"bytes={len(body)}-"})
    assert body + rest == WEIGHTS


def test_a_status_fault_says_when_to_come_back_and_heals(hub):
    set_fault(hub.fault_file, HubFault("status", value=429))
    status, headers, _ = get(f"{hub.url}/api/models/lab/tiny")
    assert (status, headers["Retry-After"]) == (429, "1")
    set_fault(hub.fault_file, None)
    assert get(f"{hub.url}/api/models/lab/tiny")[0] == 200


def test_an_expired_link_is_forbidden(hub):
    set_fault(hub.fault_file, HubFault("expire"))
    assert get(weights_link(hub))[0] == 403


def test_a_fault_hits_only_the_files_it_names(hub):
    set_fault(hub.fault_file, HubFault("wrong-hash", match="*.json"))
    assert get(weights_link(hub))[2] == WEIGHTS


def test_ranges_can_be_ignored(hub):
    set_fault(hub.fault_file, HubFault("no-range"))
    status, _, body = get(weights_link(hub), {"Range": "bytes=100-199"})
    assert (status, body) == (200, WEIGHTS)


def test_a_file_outside_the_store_is_not_served(hub):
    (hub.root.parent / "secret").write_text("no")
    assert get(f"{hub.url}/lab/tiny/resolve/main/../../../../../secret")[0] == 404
    assert get(f"{hub.url}/api/models/../..")[0] == 404


def test_a_commit_id_depends_on_content_and_note_only():
    one = commit_id([("b", "2"), ("a", "1")], "note")
    assert one == commit_id([("a", "1"), ("b", "2")], "note")
    assert one != commit_id([("a", "1"), ("b", "2")], "other")
    assert len(one) == 40
