"""Fetch and build from the lab's hub: signed links on a second host, gated files, faults."""

import json
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from builder_hub import fetch_order
from builder_trees import BASE_COMMIT, DONOR_COMMIT, ROOT, file_entries, run_tool, tree_tensors

SERVE = (
    "import sys; from pathlib import Path; from lab.hub.server import serve;"
    "serve(Path(sys.argv[1]), Path(sys.argv[2]), '127.0.0.1', int(sys.argv[3]), int(sys.argv[4]))"
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class LabHub:
    def __init__(self, directory):
        self.store, self.run_dir = directory / "store", directory / "run"
        self.run_dir.mkdir(parents=True)
        self.ports = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self.start()

    def start(self):
        command = [sys.executable, "-c", SERVE, self.store, self.run_dir, *self.ports]
        self.process = subprocess.Popen([str(part) for part in command], cwd=ROOT)
        deadline = time.monotonic() + 20
        while not all(map(is_listening, self.ports)):
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.05)

    def stop(self):
        self.process.kill()
        self.process.wait()

    def repository(self, name, commit):
        (self.store / name / "refs").mkdir(parents=True)
        (self.store / name / "refs/main").write_text(commit)
        return self.store / name / commit

    def fault(self, mode, **more):
        (self.run_dir / "hub-fault.json").write_text(json.dumps({"mode": mode, **more}))

    def log(self):
        lines = (self.run_dir / "hub-access.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def scene(workshop, tmp_path):
    """A workshop without sources, and a hub with base and donor."""
    hub = workshop.hub = LabHub(tmp_path / "hub")
    workshop.write_base(receipt=False)
    workshop.write_donor(hub.repository("lab/tiny-fp8", DONOR_COMMIT))
    source = hub.repository("lab/tiny-int4", BASE_COMMIT)
    workshop.base_dir.rename(source)
    part = f"lab/tiny-int4/resolve/{BASE_COMMIT}/"

    def fetch(check=True, mirrors=(), **changes):
        urls = [f"{url}/{part}" for url in (*mirrors, hub.url)]
        order = fetch_order(source, workshop.base_dir, urls=urls, commit=BASE_COMMIT, **changes)
        path = workshop.root / "fetch.json"
        path.write_text(json.dumps(order))
        done = run_tool("fetch", path, check=check)
        if done.returncode == 0:
            assert file_entries(workshop.base_dir) == file_entries(source)
        return done

    def build(check=True):
        url = f"{hub.url}/lab/tiny-fp8/resolve/{DONOR_COMMIT}"
        donor = {"url": url, "backoff_s": 0.01, "timeout_s": 2, "tries": 4}
        return workshop.build(check=check, donor=donor)

    workshop.fetch, workshop.build_remote = fetch, build
    yield workshop
    hub.stop()


def test_gated_repository_needs_a_token_that_only_the_hub_receives(scene):
    (scene.hub.store / "lab/tiny-int4/token").write_text("hf_lab")
    done = scene.fetch(check=False)
    assert done.returncode == 4
    assert "hf auth login" in done.stderr
    (scene.root / "token").write_text("hf_lab\n")
    scene.fetch(token_file=str(scene.root / "token"))
    signed = [line for line in scene.hub.log() if "sha256" in line["path"]]
    assert not any(line["authorized"] for line in signed)


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("status", {"value": 503, "times": 3}),
        ("status", {"value": 429, "times": 3}),
        ("truncate", {"times": 3, "match": "*.safetensors"}),
        ("expire", {"times": 2}),
        ("no-range", {"match": "*.safetensors"}),
        ("wrong-hash", {"times": 1, "match": "*extra*"}),
    ],
)
def test_fetch_survives_temporary_faults(scene, mode, more):
    scene.hub.fault(mode, **more)
    if mode == "wrong-hash":
        assert scene.fetch(check=False).returncode == 3
    scene.fetch()


def test_reports_the_reason_after_the_last_try(scene):
    scene.hub.fault("truncate", match="*.safetensors")
    done = scene.fetch(check=False)
    assert done.returncode == 4
    assert re.search(r"\.safetensors: no progress in \d+ tries and \d+ s, last: ", done.stderr)
    assert not scene.base_dir.exists()


@pytest.mark.slow
def test_waits_for_the_end_of_an_outage_and_resumes(scene):
    scene.hub.fault("truncate", match="*.safetensors")
    assert scene.fetch(check=False, tries=2).returncode == 4
    before = scene.hub.log()
    (scene.hub.run_dir / "hub-fault.json").unlink()
    scene.hub.stop()
    assert scene.fetch(check=False, tries=2).returncode == 4  # without outage_s
    restart = threading.Timer(2.0, scene.hub.start)
    restart.start()
    try:
        done = scene.fetch(tries=2, outage_s=60)
    finally:
        restart.join()
    assert "for 1 more minutes" in done.stderr
    later = scene.hub.log()[len(before) :]
    assert any(line["range"] and not line["range"].startswith("bytes=0-") for line in later)


def test_ends_after_the_longest_outage(scene):
    scene.hub.stop()
    started = time.monotonic()
    done = scene.fetch(check=False, tries=2, outage_s=1.5)
    assert done.returncode == 4
    assert re.search(r"no progress in \d+ tries and [1-9] s, last: ", done.stderr)
    assert time.monotonic() - started >= 1.5


def test_waits_for_no_outage_of_a_mirror(scene):
    started = time.monotonic()
    scene.fetch(mirrors=[f"http://127.0.0.1:{free_port()}"], tries=2, outage_s=600)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("mode", "code"), [(None, 0), ("truncate", 0), ("expire", 0), ("no-range", 4)]
)
def test_build_reads_the_right_donor_bytes_or_none(scene, mode, code):
    scene.fetch()
    if mode:
        scene.hub.fault(mode, match="*.safetensors", times=0 if code else 3)
    done = scene.build_remote(check=False)
    assert done.returncode == code, done.stderr
    assert scene.out.exists() == (code == 0)
    if code == 0:
        result = tree_tensors(scene.out)
        for module in scene.modules:
            assert result[f"{module}.weight_fp8"] == scene.donor[f"{module}.weight"]


def test_leaves_a_stalled_connection_after_the_timeout(scene):
    scene.hub.fault("stall", match="*.safetensors", times=1)
    started = time.monotonic()
    scene.fetch(timeout_s=1)
    assert time.monotonic() - started < 15


def test_inspects_a_repository(scene):
    done = run_tool("inspect", "lab/tiny-int4", "--endpoint", scene.hub.url, "--json")
    data = json.loads(done.stdout)
    assert data["place"] == f"lab/tiny-int4@{BASE_COMMIT}"
    assert data["tensors"] == len(scene.base) + len(scene.mtp)
