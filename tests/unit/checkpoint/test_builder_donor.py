"""The donor by byte ranges: what is asked, what is refused, who sees the token."""

import json
import time

import pytest
from builder_hub import Hub
from builder_shards import Raw
from builder_trees import DONOR_COMMIT, DONOR_SHAPES, tree_tensors
from hypothesis import given
from hypothesis import strategies as st
from spark_checkpoint.sources.donor import NamedRange, merge

DONOR = f"lab/tiny-fp8/resolve/{DONOR_COMMIT}"
# Of a range this long the half that comes is progress, also where a busy machine takes ten seconds
# for it; the few bytes of a scale are not.
LONG_BYTES = 24_000


@pytest.fixture
def remote(workshop, hub):
    workshop.write_base()
    workshop.write_donor(hub.root / DONOR)

    def build(check=True, token=None, **wire):
        donor = {"url": f"{hub.url}/{DONOR}", "tries": 3, "backoff_s": 0.01, "timeout_s": 5, **wire}
        if token is not None:
            (workshop.root / "token").write_text(token)
            donor["token_file"] = str(workshop.root / "token")
        return workshop.build(check=check, donor=donor)

    return build


def is_shard(path):
    return path.endswith(".safetensors")


def of_header(wanted):
    return wanted.startswith(("bytes=0-", "bytes=8-"))


def header_ranges(shard):
    """Return (file, first, last) of what must be asked to know a header: its length, then all."""
    length = int.from_bytes(shard.read_bytes()[:8], "little")
    return [(shard.name, 0, 7), (shard.name, 8, 8 + length - 1)]


def test_a_remote_donor_gives_the_same_tree_as_a_local_one(workshop, remote):
    remote()
    by_url = tree_tensors(workshop.out)
    workshop.out.rename(workshop.out.with_name("by-url"))
    workshop.write_donor()
    workshop.build()
    assert tree_tensors(workshop.out) == by_url


def test_only_headers_and_the_needed_ranges_are_asked_for(workshop, hub, remote):
    # Big routed experts first and between, as in the real donor: nothing here is wanted.
    heavy = Raw("BF16", (1 << 20,), bytes(2 << 20))
    swapped = {f"{m}.{s}" for m in workshop.modules for s in ("weight", "weight_scale_inv")}
    layers = {name.split(".mlp.")[0] for name in swapped}
    fillers = {f"{layer}.mlp.experts.0.down_proj.weight": heavy for layer in sorted(layers)}
    wanted = {name: raw for name, raw in workshop.donor.items() if name in swapped}
    others = {name: raw for name, raw in workshop.donor.items() if name not in swapped}
    workshop.donor = {**fillers, **wanted, **others}
    workshop.write_donor(hub.root / DONOR)
    remote()
    asked = [
        (path.rsplit("/", 1)[-1], *map(int, headers["Range"].removeprefix("bytes=").split("-")))
        for path, headers, _ in hub.requests
        if is_shard(path)
    ]
    shards = sorted((hub.root / DONOR).glob("*.safetensors"))
    headers = [part for path in shards for part in header_ranges(path)]
    ranges = [item for item in asked if item not in headers]
    assert sorted(set(asked) - set(ranges)) == sorted(headers)
    assert len(asked) == len(headers) + len(ranges)
    assert sorted(ranges) == sorted(r for path in shards for r in joined_ranges(path, swapped))
    report = json.loads((workshop.out / "receipt.json").read_text())["report"]
    index_bytes = (hub.root / DONOR / "model.safetensors.index.json").stat().st_size
    ranges_bytes = sum(last + 1 - first for _, first, last in ranges)
    headers_bytes = sum(last + 1 - first for _, first, last in headers)
    expected = index_bytes + headers_bytes + ranges_bytes
    assert report["donor_received_bytes"] == expected
    assert ranges_bytes < sum(path.stat().st_size for path in shards) / 4


def test_a_donor_of_other_shapes_is_refused_from_its_headers_alone(workshop, hub, remote):
    name = f"{workshop.modules[0]}.weight"
    raw = workshop.donor[name]
    workshop.donor[name] = Raw(raw.dtype, raw.shape[::-1], raw.data)
    workshop.write_donor(hub.root / DONOR)
    done = remote(check=False)
    assert done.returncode == 3
    assert f"donor {name}: is [128, 256], the plan's donor_shapes require [256, 128]" in done.stderr
    asked = [headers.get("Range") for path, headers, _ in hub.requests if is_shard(path)]
    assert asked
    assert all(map(of_header, asked))


def test_a_base_of_other_shapes_is_refused_before_the_hub_is_asked(workshop, hub, remote):
    shapes = [{**DONOR_SHAPES[0], "weight": [256, 256], "scale": [2, 2]}, DONOR_SHAPES[1]]
    donor = {"url": f"{hub.url}/{DONOR}", "tries": 8, "backoff_s": 1.0}
    done = workshop.build(check=False, donor=donor, donor_shapes=shapes)
    assert done.returncode == 3
    assert "the plan's donor_shapes require [256, 256]" in done.stderr
    assert not hub.requests


def joined_ranges(shard, names):
    """Return (file, first, last) of the wanted tensors, joined over gaps of up to 64 KiB."""
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    joined = []
    for begin, end in sorted(tuple(header[n]["data_offsets"]) for n in names if n in header):
        if joined and begin - joined[-1][1] <= 64 << 10:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    return [(shard.name, 8 + length + begin, 8 + length + end - 1) for begin, end in joined]


def test_a_header_takes_two_requests_however_long_it_is(workshop, hub, remote):
    workshop.donor |= {
        f"model.language_model.layers.0.mlp.experts.{n}.{'x' * 200}": workshop.donor[
            "mtp.norm.weight"
        ]
        for n in range(5000)
    }
    workshop.write_donor(hub.root / DONOR)
    remote()
    asked = sorted(h["Range"] for p, h, _ in hub.requests if is_shard(p) and of_header(h["Range"]))
    shards = (hub.root / DONOR).glob("*.safetensors")
    parts = [part for path in shards for part in header_ranges(path)]
    assert asked == sorted(f"bytes={first}-{last}" for _, first, last in parts)


def test_a_whole_file_where_a_range_was_asked_is_refused(hub, remote):
    hub.ignore_ranges = True
    done = remote(check=False)
    assert done.returncode == 4
    assert "whole file for a range request" in done.stderr


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(hub, remote, status):
    refused = []

    def busy(handler, path, data):
        if is_shard(path) and len(refused) < 2:
            refused.append(path)
            handler.answer(status, b"later")
            return True
        return False

    hub.fault = busy
    done = remote()
    assert f"HTTP {status}" in done.stderr


def test_retry_after_is_obeyed(hub, remote):
    moments = []

    def busy(handler, path, data):
        if is_shard(path):
            moments.append(time.monotonic())
            if len(moments) == 1:
                handler.answer(429, b"", {"Retry-After": "1"})
                return True
        return False

    hub.fault = busy
    remote(parallel=1)
    assert moments[1] - moments[0] >= 1


def test_a_connection_that_breaks_is_continued_where_it_stopped(hub, remote):
    broken = []

    def cut(handler, path, data):
        wanted = handler.headers.get("Range", "")
        if not is_shard(path) or of_header(wanted) or len(broken) >= 3:
            return False
        first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
        if last - first < LONG_BYTES:
            return False
        broken.append((first, last))
        place = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        half = data[first : (first + last) // 2]
        handler.answer(206, half, place, announced=last + 1 - first)
        handler.close_connection = True
        return True

    hub.fault = cut
    remote(parallel=1)
    assert len(broken) == 3
    assert [last for _, last in broken] == [broken[0][1]] * 3
    assert broken[0][0] < broken[1][0] < broken[2][0]


BAD_ANSWERS = {
    "short": lambda first, last, data: (data[first:last], f"bytes {first}-{last}/{len(data)}"),
    "long": lambda first, last, data: (data[first : last + 2], f"bytes {first}-{last}/{len(data)}"),
    "another range": lambda first, last, data: (
        data[first - 1 : last],
        f"bytes {first - 1}-{last - 1}/{len(data)}",
    ),
    "another size": lambda first, last, data: (
        data[first : last + 1],
        f"bytes {first}-{last}/{len(data) + 8}",
    ),
    "no place": lambda first, last, data: (data[first : last + 1], "bytes */*"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_an_answer_to_another_question_is_refused(workshop, hub, remote, kind):
    def lie(handler, path, data):
        wanted = handler.headers.get("Range", "")
        if not is_shard(path) or of_header(wanted):
            return False
        first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
        body, place = BAD_ANSWERS[kind](first, last, data)
        handler.answer(206, body, {"Content-Range": place})
        return True

    hub.fault = lie
    done = remote(check=False)
    assert done.returncode in (3, 4)
    assert done.stderr.strip().splitlines()[-1].startswith("error: http://")
    assert not workshop.out.exists()


def test_the_token_goes_to_the_hub_and_never_to_where_it_redirects(workshop, hub, remote):
    with Hub(hub.root) as content_host:
        hub.redirect_to = lambda path: f"{content_host.url}{path}"
        remote(token="hf_secret")
    assert {headers.get("Authorization") for _, headers, _ in hub.requests} == {"Bearer hf_secret"}
    assert content_host.requests
    assert all("Authorization" not in headers for _, headers, _ in content_host.requests)


def test_an_expired_signed_address_is_asked_for_again(workshop, hub, remote):
    tickets = []

    def sign(path):
        tickets.append(f"{len(tickets)}")
        return f"{content_host.url}{path}?ticket={tickets[-1]}"

    uses = {}

    def expire(handler, path, data):
        uses[handler.path] = uses.get(handler.path, 0) + 1
        if uses[handler.path] <= 1:
            return False
        handler.answer(403, b"expired")
        return True

    with Hub(hub.root) as content_host:
        content_host.fault = expire
        hub.redirect_to = sign
        done = remote(parallel=1)
    assert "the signed link expired" in done.stderr
    assert max(uses.values()) == 2


def test_an_address_is_signed_once_for_many_ranges(hub, remote):
    with Hub(hub.root) as content_host:
        hub.redirect_to = lambda path: f"{content_host.url}{path}"
        remote()
    shards = [path for path, _, _ in hub.requests if is_shard(path)]
    assert sorted(shards) == sorted(set(shards))


def test_a_hub_that_answers_with_another_commit_is_refused(hub, remote):
    hub.headers = {"X-Repo-Commit": "e" * 40}
    done = remote(check=False)
    assert done.returncode == 3
    assert "answers with commit eeee" in done.stderr


def test_a_missing_donor_and_a_forbidden_one_say_so(workshop, hub, remote):
    hub.fault = lambda handler, path, data: handler.answer(401, b"") or True
    done = remote(check=False)
    assert done.returncode == 4
    assert "answers 401; fix: check the name; if it is private or gated, accept" in done.stderr


def test_ranges_staged_before_a_failure_are_not_asked_again(workshop, hub, remote):
    asked = []

    def fail_late(handler, path, data):
        wanted = handler.headers.get("Range", "")
        if is_shard(path) and not of_header(wanted):
            asked.append((path, wanted))
            if "model-00002" in path:
                handler.answer(404, b"gone")
                return True
        return False

    hub.fault = fail_late
    assert remote(check=False, parallel=1).returncode == 4
    first = [item for item in asked if "model-00001" in item[0]]
    asked.clear()
    hub.fault = lambda h, path, data: asked.append((path, h.headers.get("Range", "")))
    remote(parallel=1)
    assert first
    assert not set(first) & set(asked)


def test_a_donor_in_a_single_file_needs_no_index(workshop, hub, remote):
    for path in (hub.root / DONOR).iterdir():
        path.unlink()
    workshop.write_donor(hub.root / DONOR, shard_count=1)
    (hub.root / DONOR / "model.safetensors.index.json").unlink()
    shard = hub.root / DONOR / "model-00001-of-00001.safetensors"
    shard.rename(shard.with_name("model.safetensors"))
    remote()


spans = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 300)), max_size=30)


@given(spans, st.integers(0, 200), st.integers(1, 1000))
def test_merged_requests_cover_every_piece_once_and_in_order(pieces, gap, limit):
    wanted = [NamedRange(str(n), begin, begin + size) for n, (begin, size) in enumerate(pieces)]
    requests = merge(wanted, gap, limit)
    assert sorted(p.name for r in requests for p in r.pieces) == sorted(w.name for w in wanted)
    for request in requests:
        assert request.begin == min(p.begin for p in request.pieces)
        assert request.end == max(p.end for p in request.pieces)
        longest = max(p.end - p.begin for p in request.pieces)
        assert request.end - request.begin <= max(limit, longest)
        reached = request.begin
        for piece in request.pieces:
            assert piece.begin - reached <= gap
            reached = max(reached, piece.end)
