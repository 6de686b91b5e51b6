import shutil
import time
from functools import partial

import pytest
from builder_hub import Hub
from builder_shards import Raw
from builder_trees import DONOR_COMMIT, DONOR_SHAPES, run_tool, tree_tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from spark_checkpoint import storage
from spark_checkpoint.build.build import build
from spark_checkpoint.headers import read_header
from spark_checkpoint.progress import Progress
from spark_checkpoint.sources.donor import NamedRange, merge_ranges
from spark_contract.builder_api import BuildPlan
from spark_contract.documents import parse

DONOR = f"lab/tiny-fp8/resolve/{DONOR_COMMIT}"


@pytest.fixture
def build_remote(workshop, hub):
    workshop.write_base()
    workshop.write_donor(hub.root / DONOR)

    def build(check=True, token=None, layout="overlay", **wire):
        donor = {"url": f"{hub.url}/{DONOR}", "tries": 3, "backoff_s": 0.01, "timeout_s": 5, **wire}
        if token is not None:
            (workshop.root / "token").write_text(token)
            donor["token_file"] = str(workshop.root / "token")
        return workshop.build(check=check, donor=donor, layout=layout)

    return build


def is_shard(path):
    return path.endswith(".safetensors")


def is_header(byte_range):
    return byte_range.startswith(("bytes=0-", "bytes=8-"))


def parse_range(handler):
    first, last = handler.headers.get("Range", "").removeprefix("bytes=").split("-")
    return int(first), int(last)


def reads_weights(handler, path):
    return is_shard(path) and not is_header(handler.headers.get("Range", ""))


def header_ranges(shard):
    length = int.from_bytes(shard.read_bytes()[:8], "little")
    return [(shard.name, 0, 7), (shard.name, 8, 8 + length - 1)]


def joined_ranges(shard, names):
    header = read_header(shard)
    joined = []
    for begin, end in sorted(header.tensors[name][2:] for name in names if name in header.tensors):
        if joined and begin - joined[-1][1] <= 64 << 10:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    start = header.data_start
    return [(shard.name, start + begin, start + end - 1) for begin, end in joined]


def test_remote_and_local_donors_give_identical_results(workshop, build_remote):
    build_remote()
    by_url = tree_tensors(workshop.out)
    sha256 = workshop.read("receipt.json")["donor_sha256"]
    workshop.out.rename(workshop.out.with_name("by-url"))
    workshop.build()
    assert tree_tensors(workshop.out) == by_url
    assert workshop.read("receipt.json")["donor_sha256"] == sha256


def lie_about(hub, name, mask=1):
    """Flip bits in the first byte of a tensor of the donor; every header stays the same."""
    for path in (hub.root / DONOR).glob("*.safetensors"):
        header = read_header(path)
        if name in header.tensors:
            at = header.file_offset(name)

    def fault(handler, path, data):
        byte_range = handler.headers.get("Range", "")
        if not is_shard(path) or is_header(byte_range):
            return False
        first, last = parse_range(handler)
        if not first <= at <= last or name not in str(data[: header_bytes(data)]):
            return False
        handler.serve(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
        return True

    hub.fault = fault


def header_bytes(data):
    return 8 + int.from_bytes(data[:8], "little")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["an FP8 weight", "an MTP tensor"])
def test_rejects_donor_bytes_that_differ_from_locked_hash(workshop, hub, build_remote, kind):
    name = f"{workshop.modules[0]}.weight"
    if kind == "an MTP tensor":
        name, workshop.mtp = "mtp.fc.weight", {}
        shutil.rmtree(workshop.base_dir)
        workshop.write_base()
    honest = workshop.donor[name]
    lie_about(hub, name)
    build = partial(build_remote, layout="full")
    build()
    receipt = workshop.read("receipt.json")
    assert workshop.result()[name].data != honest.data
    assert run_tool("verify", workshop.out, "--full").returncode == 0
    workshop.out.rename(workshop.out.with_name("first"))
    hub.fault = None
    build()
    sha256 = workshop.read("receipt.json")["donor_sha256"]
    assert sha256 != receipt["donor_sha256"]
    assert workshop.read("receipt.json")["digest"] == receipt["digest"]
    workshop.out.rename(workshop.out.with_name("second"))
    lie_about(hub, name)
    refused = build(check=False, sha256=sha256)
    assert refused.returncode == 3
    assert f"{hub.url}/{DONOR}: sent tensors with sha256" in refused.stderr
    assert not workshop.out.exists()
    hub.fault = None
    build(sha256=sha256)
    shard = workshop.out / workshop.index()[name]
    with safe_open(shard, "np") as file:
        assert file.get_slice(name).get_shape() == list(honest.shape)
    assert workshop.result()[name].data == honest.data


def test_reads_only_headers_and_required_ranges(workshop, hub, build_remote):
    heavy = Raw("BF16", (1 << 20,), bytes(2 << 20))
    swapped = {
        f"{module}.{suffix}"
        for module in workshop.modules
        for suffix in ("weight", "weight_scale_inv")
    }
    layers = {name.split(".mlp.")[0] for name in swapped}
    fillers = {f"{layer}.mlp.experts.0.down_proj.weight": heavy for layer in sorted(layers)}
    required = {name: raw for name, raw in workshop.donor.items() if name in swapped}
    workshop.donor = {**fillers, **required, **workshop.donor}
    workshop.write_donor(hub.root / DONOR)
    build_remote()
    requests = [
        (path.rsplit("/", 1)[-1], *map(int, headers["Range"].removeprefix("bytes=").split("-")))
        for path, headers, _ in hub.requests
        if is_shard(path)
    ]
    shards = sorted((hub.root / DONOR).glob("*.safetensors"))
    headers = [part for path in shards for part in header_ranges(path)]
    ranges = [part for path in shards for part in joined_ranges(path, swapped)]
    assert sorted(requests) == sorted(headers + ranges)
    ranges_bytes = sum(last + 1 - first for _, first, last in ranges)
    assert ranges_bytes < sum(path.stat().st_size for path in shards) / 4


def test_rejects_donor_with_wrong_shapes_after_reading_headers(workshop, hub, build_remote):
    name = f"{workshop.modules[0]}.weight"
    raw = workshop.donor[name]
    workshop.donor[name] = Raw(raw.dtype, raw.shape[::-1], raw.data)
    workshop.write_donor(hub.root / DONOR)
    done = build_remote(check=False)
    assert done.returncode == 3
    assert f"donor {name}: has shape [128, 256]" in done.stderr
    ranges = [headers.get("Range") for path, headers, _ in hub.requests if is_shard(path)]
    assert ranges
    assert all(map(is_header, ranges))


def test_rejects_base_with_wrong_shapes_without_contacting_hub(workshop, hub, build_remote):
    shapes = [{**DONOR_SHAPES[0], "weight": [256, 256], "scale": [2, 2]}, DONOR_SHAPES[1]]
    donor = {"url": f"{hub.url}/{DONOR}", "tries": 8, "backoff_s": 1.0}
    assert workshop.build(check=False, donor=donor, donor_shapes=shapes).returncode == 3
    assert not hub.requests


def test_rejects_a_complete_file_in_response_to_a_range_request(hub, build_remote):
    hub.ignore_ranges = True
    assert build_remote(check=False).returncode == 4


def test_waits_as_long_as_the_retry_after_header_requests(hub, build_remote):
    times = []

    def busy(handler, path, data):
        if is_shard(path):
            times.append(time.monotonic())
            if len(times) == 1:
                handler.answer(429, b"", {"Retry-After": "1"})
                return True
        return False

    hub.fault = busy
    build_remote(parallel=1)
    assert times[1] - times[0] >= 1


# Bytes sent for first to last, and the announced first, last and total.
BAD_RESPONSES = {
    "short": lambda begin, end, size: (slice(begin, end), f"{begin}-{end}/{size}"),
    "long": lambda begin, end, size: (slice(begin, end + 2), f"{begin}-{end}/{size}"),
    "another range": lambda begin, end, size: (
        slice(begin - 1, end),
        f"{begin - 1}-{end - 1}/{size}",
    ),
    "another size": lambda begin, end, size: (slice(begin, end + 1), f"{begin}-{end}/{size + 8}"),
    "no range": lambda begin, end, size: (slice(begin, end + 1), "*/*"),
}


@pytest.mark.parametrize("kind", BAD_RESPONSES)
def test_rejects_response_with_different_range(workshop, hub, build_remote, kind):
    def respond_wrongly(handler, path, data):
        if not reads_weights(handler, path):
            return False
        part, place = BAD_RESPONSES[kind](*parse_range(handler), len(data))
        handler.answer(206, data[part], {"Content-Range": f"bytes {place}"})
        return True

    hub.fault = respond_wrongly
    assert build_remote(check=False).returncode in (3, 4)
    assert not workshop.out.exists()


def test_sends_token_only_to_hub_and_reuses_signed_links(workshop, hub, build_remote):
    with Hub(hub.root) as content_host:
        hub.redirect_to = lambda path: f"{content_host.url}{path}"
        build_remote(token="hf_secret")
    assert {headers.get("Authorization") for _, headers, _ in hub.requests} == {"Bearer hf_secret"}
    assert content_host.requests
    assert all("Authorization" not in headers for _, headers, _ in content_host.requests)
    shards = [path for path, _, _ in hub.requests if is_shard(path)]
    assert sorted(shards) == sorted(set(shards))


def test_rejects_response_for_different_commit(hub, build_remote):
    hub.headers = {"X-Repo-Commit": "e" * 40}
    done = build_remote(check=False)
    assert done.returncode == 3
    assert "eeee" in done.stderr


def test_next_run_reuses_ranges_downloaded_before_failure(hub, build_remote):
    requested = []

    def fail_late(handler, path, data):
        if reads_weights(handler, path):
            requested.append((path, handler.headers["Range"]))
            if "model-00002" in path:
                handler.answer(404, b"gone")
                return True
        return False

    hub.fault = fail_late
    assert build_remote(check=False, parallel=1).returncode == 4
    staged = {item for item in requested if "model-00001" in item[0]}
    requested.clear()
    hub.fault = lambda h, path, data: requested.append((path, h.headers.get("Range", "")))
    build_remote(parallel=1)
    assert staged
    assert not staged & set(requested)


def test_next_run_requires_no_space_for_ranges_that_it_reuses(
    workshop, hub, build_remote, monkeypatch
):
    hub.fault = lambda handler, path, data: (
        reads_weights(handler, path) and "model-00002" in path and not handler.answer(404, b"gone")
    )
    assert build_remote(check=False, parallel=1).returncode == 4
    hub.fault = None
    [donor] = workshop.out.parent.glob(".*/donor-*")
    staged = sum(path.stat().st_blocks * 512 for path in donor.iterdir())
    required = []
    monkeypatch.setattr(storage, "check_free_space", lambda path, size, _: required.append(size))
    for _ in range(2):
        build(parse(BuildPlan, (workshop.root / "plan.json").read_text()), Progress(quiet=True))
        shutil.rmtree(workshop.out)
    assert required[1] - required[0] == staged > 0


def test_next_run_downloads_damaged_weights_again(workshop, hub, build_remote):
    lie_about(hub, f"{workshop.modules[0]}.weight", mask=0x80)
    refused = build_remote(check=False)
    assert refused.returncode == 3
    assert "fix: download the FP8 source again" in refused.stderr
    hub.fault = None
    build_remote()


def test_reads_single_file_donor_without_index(workshop, hub, build_remote):
    for path in (hub.root / DONOR).iterdir():
        path.unlink()
    workshop.write_donor(hub.root / DONOR, shard_count=1)
    (hub.root / DONOR / "model.safetensors.index.json").unlink()
    shard = hub.root / DONOR / "model-00001-of-00001.safetensors"
    shard.rename(shard.with_name("model.safetensors"))
    build_remote()


spans = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 300)), max_size=30)


@given(spans, st.integers(0, 200), st.integers(1, 1000))
def test_merged_requests_cover_each_range_once_in_order(pieces, gap, limit):
    ranges = [NamedRange(str(n), begin, begin + size) for n, (begin, size) in enumerate(pieces)]
    requests = merge_ranges(ranges, gap, limit)
    assert sorted(wanted.name for request in requests for wanted in request.ranges) == sorted(
        wanted.name for wanted in ranges
    )
    for request in requests:
        assert request.begin == min(wanted.begin for wanted in request.ranges)
        assert request.end == max(wanted.end for wanted in request.ranges)
        longest = max(wanted.end - wanted.begin for wanted in request.ranges)
        assert request.end - request.begin <= max(limit, longest)
        reached = request.begin
        for wanted in request.ranges:
            assert wanted.begin - reached <= gap
            reached = max(reached, wanted.end)
