"""Base and donor are held against a plan by their headers, before their weights are asked for."""

import contextlib
import io
import json
import re

import pytest
from builder_hub import Hub
from builder_trees import BASE_COMMIT, Workshop, run_tool
from hypothesis import given, settings
from hypothesis import strategies as st
from spark_checkpoint.__main__ import main

from tests.unit.hostile import hostile

DONOR_COMMIT = "d" * 40
PLACE = f"lab/base@{BASE_COMMIT}"


@pytest.fixture
def scene(tmp_path):
    """A workshop, and a hub that has its base and its donor."""
    (tmp_path / "here").mkdir()
    with Hub(tmp_path / "hub") as hub:
        yield Workshop(tmp_path / "here"), hub


def publish(workshop, hub):
    """Put base and donor on the hub; return the order that names them."""
    workshop.write_base(receipt=False)
    base = hub.root / "lab/base/resolve" / BASE_COMMIT
    base.parent.mkdir(parents=True)
    workshop.base_dir.rename(base)
    workshop.write_donor(hub.root / "lab/donor/resolve" / DONOR_COMMIT)
    listing = hub.root / "api/models/lab/base/revision" / BASE_COMMIT
    listing.parent.mkdir(parents=True)
    siblings = [{"rfilename": path.name} for path in base.iterdir()]
    listing.write_text(json.dumps({"sha": BASE_COMMIT, "siblings": siblings}))
    return base


def order(workshop, hub, **changes):
    url = f"{hub.url}/lab/donor/resolve/{DONOR_COMMIT}"
    donor = {"url": url, "tries": 2, "backoff_s": 0.01}
    return workshop.write_plan(**{"donor": donor, **changes})


def held(workshop, hub, **changes):
    plan = order(workshop, hub, **changes)
    return run_tool("hold", plan, PLACE, "--endpoint", hub.url, check=False)


def header_ends(root):
    """Return path on the hub → where the header of a shard ends."""
    ends = {}
    for path in root.rglob("*.safetensors"):
        length = int.from_bytes(path.read_bytes()[:8], "little")
        ends[f"/{path.relative_to(root)}"] = 8 + length
    return ends


def test_right_sources_are_counted_and_no_byte_of_weights_is_read(scene):
    workshop, hub = scene
    publish(workshop, hub)
    found = json.loads(held(workshop, hub).stdout)
    assert found["base_tensors"] == len(workshop.base) + len(workshop.mtp)
    assert found["donor_tensors"] == len(
        [name for name in workshop.donor if ".mlp.experts." not in name or name.startswith("mtp.")]
    )
    assert found["swapped_modules"] == len(workshop.modules)
    assert (found["mtp_tensors"], found["mtp_from_donor"]) == (len(workshop.mtp), 0)
    ends = header_ends(hub.root)
    asked = [(path, headers["Range"]) for path, headers, _ in hub.requests if path in ends]
    assert {path for path, _ in asked if "/lab/base/" in path} == {p for p in ends if "base" in p}
    for path, wanted in asked:
        assert int(re.fullmatch(r"bytes=\d+-(\d+)", wanted)[1]) < ends[path]


def lose(names, part):
    names.pop(next(name for name in names if part in name))


WRONG = {
    "a base that lost a name": (lambda w: lose(w.base, ".self_attn."), "base tensors: "),
    "a donor that lost a scale": (
        lambda w: lose(w.donor, ".shared_expert.up_proj.weight_scale_inv"),
        "donor weights and scales: ",
    ),
    "a donor of another shape": (
        lambda w: w.donor.update({f"{w.modules[0]}.weight": w.donor[f"{w.modules[-1]}.weight"]}),
        "the plan's donor_shapes require",
    ),
    "an MTP head that neither has": (
        lambda w: (w.mtp.clear(), lose(w.donor, "mtp.fc.")),
        "donor names without a partner: ",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_build_would_refuse_is_refused_in_the_same_words(scene, wrong):
    workshop, hub = scene
    good = Workshop(workshop.root).plan()
    break_it, words = WRONG[wrong]
    break_it(workshop)
    sets = {key: good[key] for key in ("base_tensors", "donor_unmatched", "mtp_tensors", "swap")}
    base = publish(workshop, hub)
    early = held(workshop, hub, **sets)
    base.rename(workshop.base_dir)
    workshop.write_receipt()
    late = run_tool("build", order(workshop, hub, **sets), check=False)
    assert (early.returncode, late.returncode) == (3, 3)
    assert words in early.stderr
    assert early.stderr.replace(PLACE, "") == late.stderr.replace(str(workshop.base_dir), "")
    assert early.stdout == ""


def test_a_hub_that_does_not_answer_is_another_failure_than_wrong_names(scene):
    workshop, hub = scene
    publish(workshop, hub)
    hub.fault = lambda handler, path, data: handler.answer(404, b"") or True
    assert held(workshop, hub).returncode == 4


# --- hubs that answer anything ------------------------------------------------------------------


def odd_header(draw, data):
    """Return a shard whose header lies: of its length, or of what is in it."""
    length = int.from_bytes(data[:8], "little")
    raw, rest = data[8 : 8 + length], data[8 + length :]
    if draw(st.booleans()):
        lie = draw(st.sampled_from([0, 1, length - 1, length + 1, 10**8, 2**63, 2**64 - 1]))
        return lie.to_bytes(8, "little") + raw + rest
    raw = draw(hostile(raw))
    return len(raw).to_bytes(8, "little") + raw + rest


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    (root / "here").mkdir()
    with Hub(root / "hub") as hub:
        workshop = Workshop(root / "here")
        publish(workshop, hub)
        yield hub, order(workshop, hub)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_whatever_a_hub_answers_there_is_one_line_and_no_traceback(stage, data):
    hub, plan = stage
    files = sorted(
        path for path in hub.root.rglob("*") if path.is_file() and path.stem != "tokenizer"
    )
    target = data.draw(st.sampled_from(files))
    real = target.read_bytes()
    if target.suffix == ".safetensors":
        answer = odd_header(data.draw, real)
    else:
        answer = data.draw(hostile(real))
    odd = f"/{target.relative_to(hub.root)}"
    hub.fault = lambda handler, path, _: path == odd and (handler.serve(answer) or True)
    for command in (["hold", str(plan), PLACE], ["inspect", PLACE, "--against", str(plan)]):
        said, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):
            code = main([*command, "--endpoint", hub.url])
        lines = said.getvalue().splitlines()
        assert all(line.isprintable() for line in told.getvalue().splitlines())
        if code == 0:
            assert lines == []
            assert told.getvalue() != ""
        else:
            assert code in (2, 3, 4)
            assert len(lines) == 1
            assert re.fullmatch(r"error: \S.*: .+; fix: .+", lines[0])
            assert lines[0].isprintable()
            assert len(lines[0]) < 2000
            assert told.getvalue() == ""
