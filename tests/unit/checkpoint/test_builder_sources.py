import contextlib
import io
import json
import re

import pytest
from builder_hub import Hub
from builder_trees import BASE_COMMIT, DONOR_COMMIT, Workshop, run_tool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from spark_checkpoint.__main__ import main

from tests.unit.hostile import hostile

PLACE = f"lab/base@{BASE_COMMIT}"


@pytest.fixture
def scene(tmp_path):
    (tmp_path / "local").mkdir()
    with Hub(tmp_path / "hub") as hub:
        yield Workshop(tmp_path / "local"), hub


def publish(workshop, hub):
    workshop.write_donor(hub.root / "lab/donor/resolve" / DONOR_COMMIT)
    return workshop.publish_base(hub, "lab/base", BASE_COMMIT)[0]


def write_plan(workshop, hub, **changes):
    url = f"{hub.url}/lab/donor/resolve/{DONOR_COMMIT}"
    donor = {"url": url, "tries": 2, "backoff_s": 0.01}
    return workshop.write_plan(**{"donor": donor, **changes})


def check_sources(workshop, hub, **changes):
    plan = write_plan(workshop, hub, **changes)
    return run_tool("check-sources", plan, PLACE, "--endpoint", hub.url, check=False)


def test_header_check_counts_tensors_without_reading_them(scene):
    workshop, hub = scene
    publish(workshop, hub)
    counts = json.loads(check_sources(workshop, hub).stdout)
    usable = [
        name for name in workshop.donor if ".mlp.experts." not in name or name.startswith("mtp.")
    ]
    assert counts == {
        "base_tensors": len(workshop.base) + len(workshop.mtp),
        "donor_tensors": len(usable),
        "swapped_modules": len(workshop.modules),
        "mtp_tensors": len(workshop.mtp),
        "mtp_from_donor": 0,
    }
    ends = {
        f"/{path.relative_to(hub.root)}": 8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in hub.root.rglob("*.safetensors")
    }
    ranges = [(path, headers["Range"]) for path, headers, _ in hub.requests if path in ends]
    assert {path for path, _ in ranges if "/lab/base/" in path} == {
        path for path in ends if "base" in path
    }
    for path, byte_range in ranges:
        assert int(re.fullmatch(r"bytes=\d+-(\d+)", byte_range)[1]) < ends[path]


def remove_first(names, part):
    names.pop(next(name for name in names if part in name))


WRONG = {
    "a base without a name": lambda workshop: remove_first(workshop.base, ".self_attn."),
    "a donor without a scale": lambda workshop: remove_first(
        workshop.donor, ".shared_expert.up_proj.weight_scale_inv"
    ),
    "a donor of another shape": lambda workshop: workshop.donor.update(
        {f"{workshop.modules[0]}.weight": workshop.donor[f"{workshop.modules[-1]}.weight"]}
    ),
    "a missing MTP tensor": lambda workshop: (
        workshop.mtp.clear(),
        remove_first(workshop.donor, "mtp.fc."),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_header_check_rejects_the_same_sources_as_a_build(scene, case):
    workshop, hub = scene
    plan = Workshop(workshop.root).plan()
    WRONG[case](workshop)
    sets = {key: plan[key] for key in ("base_tensors", "donor_unmatched", "mtp_tensors", "swap")}
    base = publish(workshop, hub)
    early = check_sources(workshop, hub, **sets)
    base.rename(workshop.base_dir)
    workshop.write_receipt()
    late = run_tool("build", write_plan(workshop, hub, **sets), check=False)
    assert (early.returncode, late.returncode, early.stdout) == (3, 3, "")
    assert early.stderr.replace(PLACE, "") == late.stderr.replace(str(workshop.base_dir), "")


def test_distinguishes_unavailable_hub_from_wrong_sources(scene):
    workshop, hub = scene
    publish(workshop, hub)
    hub.fault = lambda handler, path, data: handler.answer(404, b"") or True
    assert check_sources(workshop, hub).returncode == 4


def draw_shard(draw, data):
    length = int.from_bytes(data[:8], "little")
    raw, rest = data[8 : 8 + length], data[8 + length :]
    if draw(st.booleans()):
        wrong = draw(st.sampled_from([0, 1, length - 1, length + 1, 10**8, 2**63, 2**64 - 1]))
        return wrong.to_bytes(8, "little") + raw + rest
    raw = draw(hostile(raw))
    return len(raw).to_bytes(8, "little") + raw + rest


@pytest.fixture(scope="module")
def hostile_hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    (root / "local").mkdir()
    with Hub(root / "hub") as hub:
        workshop = Workshop(root / "local")
        publish(workshop, hub)
        yield hub, write_plan(workshop, hub)


@pytest.mark.slow
# Without shrinking: a failing example may wait for retries, and shrinking repeats it for minutes.
@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_hostile_responses_cause_one_printable_error_line(hostile_hub, data):
    hub, plan = hostile_hub
    files = sorted(
        path for path in hub.root.rglob("*") if path.is_file() and path.stem != "tokenizer"
    )
    target = data.draw(st.sampled_from(files))
    real = target.read_bytes()
    is_shard = target.suffix == ".safetensors"
    response = draw_shard(data.draw, real) if is_shard else data.draw(hostile(real))
    changed = f"/{target.relative_to(hub.root)}"
    hub.fault = lambda handler, path, _: path == changed and (handler.serve(response) or True)
    for command in (
        ["check-sources", str(plan), PLACE],
        ["inspect", PLACE, "--against", str(plan)],
    ):
        err, out = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            code = main([*command, "--endpoint", hub.url])
        lines = err.getvalue().splitlines()
        assert all(line.isprintable() for line in out.getvalue().splitlines())
        assert (out.getvalue() == "") == (code != 0)
        if code == 0:
            assert lines == []
            continue
        assert code in (2, 3, 4)
        [line] = lines
        assert re.fullmatch(r"error: \S.*: .+; fix: .+", line)
        assert line.isprintable()
        assert len(line) < 2000
