"""Fetching and building from the lab's hub: signed links on a second host, gates, faults."""

import json
import os
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
        while not self._answers():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.05)

    def _answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.ports[1])) == 0 and self._hub_answers()

    def _hub_answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.ports[0])) == 0

    def repository(self, name, commit):
        (self.store / name / "refs").mkdir(parents=True)
        (self.store / name / "refs/main").write_text(commit)
        return self.store / name / commit

    def fault(self, mode, **more):
        (self.run_dir / "hub-fault.json").write_text(json.dumps({"mode": mode, **more}))

    def answers(self):
        lines = (self.run_dir / "hub-access.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def lab_hub(tmp_path):
    hub = LabHub(tmp_path / "hub")
    yield hub
    hub.process.kill()
    hub.process.wait()


@pytest.fixture
def scene(workshop, lab_hub):
    workshop.write_base(receipt=False)
    workshop.write_donor(lab_hub.repository("lab/tiny-fp8", DONOR_COMMIT))
    workshop.base_dir.rename(lab_hub.repository("lab/tiny-int4", BASE_COMMIT))
    workshop.hub = lab_hub

    def fetch(check=True, **changes):
        source = lab_hub.store / "lab/tiny-int4" / BASE_COMMIT
        urls = [f"{lab_hub.url}/lab/tiny-int4/resolve/{BASE_COMMIT}/"]
        order = fetch_order(source, workshop.base_dir, urls=urls, commit=BASE_COMMIT, **changes)
        path = workshop.root / "fetch.json"
        path.write_text(json.dumps(order))
        return run_tool("fetch", path, check=check)

    def build(check=True, **changes):
        url = f"{lab_hub.url}/lab/tiny-fp8/resolve/{DONOR_COMMIT}"
        donor = {"url": url, "backoff_s": 0.01, "timeout_s": 2, "tries": 4, **changes}
        return workshop.build(check=check, donor=donor)

    workshop.fetch, workshop.build_remote = fetch, build
    return workshop


def test_a_base_fetched_and_a_donor_read_from_the_hub_make_the_checkpoint(scene):
    scene.fetch()
    scene.build_remote()
    plain = {n.replace("_scale_inv_fp8", "_scale_inv"): r for n, r in scene.result().items()}
    for module in scene.modules:
        assert plain[f"{module}.weight_fp8"] == scene.donor[f"{module}.weight"]
    run_tool("verify", scene.out, "--full")


def test_a_gated_repository_needs_the_token_and_shows_it_to_the_hub_alone(scene):
    (scene.hub.store / "lab/tiny-int4/token").write_text("hf_lab")
    done = scene.fetch(check=False)
    assert done.returncode == 4
    assert "answers 401; fix: check the name; if it is private or gated, accept" in done.stderr
    assert "hf auth login" in done.stderr
    (scene.root / "token").write_text("hf_lab\n")
    scene.fetch(token_file=str(scene.root / "token"))
    signed = [line for line in scene.hub.answers() if "sha256" in line["path"]]
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
def test_a_hub_that_misbehaves_for_a_while_is_got_over(scene, mode, more):
    scene.hub.fault(mode, **more)
    done = scene.fetch(check=False)
    if mode == "wrong-hash":
        assert done.returncode == 3
        done = scene.fetch()
    assert done.returncode == 0, done.stderr
    expected = file_entries(scene.hub.store / "lab/tiny-int4" / BASE_COMMIT)
    assert file_entries(scene.base_dir) == expected


def test_a_hub_that_cuts_every_answer_is_named_with_what_it_does(scene):
    scene.hub.fault("truncate", match="*.safetensors")
    done = scene.fetch(check=False)
    assert done.returncode == 4
    assert re.search(r"\.safetensors: no progress in \d+ tries and \d+ s, last: ", done.stderr)
    assert re.search(r"the connection ended \d+ bytes early; fix: ", done.stderr)
    assert not scene.base_dir.exists()


@pytest.mark.slow
def test_a_line_that_breaks_for_longer_than_all_tries_is_waited_out(scene):
    """Files of an earlier try are kept: the hub sends each byte of them once."""
    scene.hub.fault("truncate", match="*.safetensors")
    assert scene.fetch(check=False, tries=2).returncode == 4
    sent = scene.hub.answers()
    (scene.hub.run_dir / "hub-fault.json").unlink()
    scene.hub.process.kill()
    scene.hub.process.wait()
    assert scene.fetch(check=False, tries=2).returncode == 4  # without patience that is the end
    back = threading.Timer(2.0, scene.hub.start)
    back.start()
    try:
        done = scene.fetch(tries=2, outage_s=60)
    finally:
        back.join()
    assert "for 1 more minutes" in done.stderr
    expected = file_entries(scene.hub.store / "lab/tiny-int4" / BASE_COMMIT)
    assert file_entries(scene.base_dir) == expected
    later = scene.hub.answers()[len(sent) :]
    assert any(line["range"] and not line["range"].startswith("bytes=0-") for line in later)


def test_an_outage_ends_at_its_limit_and_says_so(scene):
    scene.hub.process.kill()
    scene.hub.process.wait()
    began = time.monotonic()
    done = scene.fetch(check=False, tries=2, outage_s=1.5)
    assert done.returncode == 4
    assert re.search(r"no progress in \d+ tries and [1-9] s, last: ", done.stderr)
    assert "run again: it resumes here" in done.stderr
    assert time.monotonic() - began >= 1.5


def test_nobody_waits_for_a_mirror_as_long_as_for_the_hub(scene):
    source = scene.hub.store / "lab/tiny-int4" / BASE_COMMIT
    part = f"lab/tiny-int4/resolve/{BASE_COMMIT}/"
    urls = [f"http://127.0.0.1:{free_port()}/{part}", f"{scene.hub.url}/{part}"]
    order = fetch_order(source, scene.base_dir, urls, commit=BASE_COMMIT, tries=2, outage_s=600)
    (scene.root / "fetch.json").write_text(json.dumps(order))
    began = time.monotonic()
    run_tool("fetch", scene.root / "fetch.json")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("mode", "code"), [("truncate", 0), ("expire", 0), ("no-range", 4)])
def test_a_donor_is_read_right_or_not_at_all(scene, mode, code):
    scene.fetch()
    scene.hub.fault(mode, match="*.safetensors", times=0 if code else 3)
    done = scene.build_remote(check=False)
    assert done.returncode == code, done.stderr
    assert scene.out.exists() == (code == 0)
    if code == 0:
        plain = tree_tensors(scene.out)
        for module in scene.modules:
            assert plain[f"{module}.weight_fp8"] == scene.donor[f"{module}.weight"]


def test_a_stalled_hub_is_left_after_the_allowed_silence(scene):
    scene.hub.fault("stall", match="*.safetensors", times=1)
    began = time.monotonic()
    scene.fetch(timeout_s=1)
    assert time.monotonic() - began < 15
    expected = file_entries(scene.hub.store / "lab/tiny-int4" / BASE_COMMIT)
    assert file_entries(scene.base_dir) == expected


def test_inspect_reads_a_repository_of_the_hub(scene):
    done = run_tool("inspect", "lab/tiny-int4", "--endpoint", scene.hub.url, "--json")
    data = json.loads(done.stdout)
    assert data["place"] == f"lab/tiny-int4@{BASE_COMMIT}"
    assert data["tensors"] == len(scene.base) + len(scene.mtp)
    assert "HF_TOKEN" not in os.environ or os.environ["HF_TOKEN"] not in done.stdout
