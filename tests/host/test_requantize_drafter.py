import re

import pytest
import yaml

from tests.host.test_requantize import own_model, requantize
from tests.labkit import CHECKOUT, SPARE, Site, guest_named, lab
from tests.published import chat

pytestmark = pytest.mark.engine

NAME = SPARE[0]
KEPT = "mtp.layers.0.mlp.shared_expert.{gate,up,down}_proj.weight"
PACKED = (
    "mtp.layers.0.mlp.experts.{0..7}.{gate,up,down}_proj",
    "mtp.layers.0.self_attn.{q,k,v,o}_proj",
)


def small_drafter():
    model = own_model()
    tensors = yaml.safe_load((CHECKOUT / "catalog/models/lab-tiny.yml").read_text())["tensors"]
    weights = {f"{module}.weight": f"{module}.{{qweight,qzeros,scales}}" for module in PACKED}
    mtp = [weights.get(line, line) for line in tensors["mtp"]]
    assert KEPT in mtp
    model["tensors"] = {
        **model["tensors"],
        "mtp": mtp,
        "counts": {**model["tensors"]["counts"], "mtp": tensors["counts"]["mtp"] + 56},
    }
    return {**model, "architecture": {"mtp_scheme": "int4"}}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    lab("up", NAME, "--fresh", "--engine", "cpu")
    site = Site(tmp_path_factory.mktemp("requantize-drafter"), hosts=[NAME])
    models = site.root / "catalog/models"
    models.mkdir(parents=True)
    (models / "lab-own.yml").write_text(yaml.safe_dump(small_drafter()))
    site.choose(model="lab-own", profile="v2", requantize={"iters": 0})
    return site


def test_requantize_job_packs_every_listed_drafter_block(site):
    guest = guest_named(NAME)
    result = requantize(site)
    assert result.returncode == 0, result.stderr[-4000:]
    [tree] = guest.run("ls -d /srv/spark/models/lab-own-int4-*").split()
    receipt = guest.json(f"cat {tree}/receipt.json")
    assert receipt["kind"] == "requantized"
    assert receipt["report"]["packed_modules"] == 109 + 28
    assert receipt["report"]["error"]["worst"] < 0.25
    names = guest.json(f"cat {tree}/model.safetensors.index.json")["weight_map"]
    drafter = {name for name in names if name.startswith("mtp.")}
    assert len(drafter) == 41 + 56
    assert "mtp.layers.0.mlp.experts.7.down_proj.qweight" in drafter
    assert {"mtp.fc.weight", "mtp.layers.0.mlp.shared_expert.up_proj.weight"} < drafter
    quantization = guest.json(f"cat {tree}/config.json")["quantization_config"]
    assert "mtp.layers" in quantization["block_name_to_quantize"]
    for module in ("mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert.up_proj"):
        assert quantization["extra_config"][module]["bits"] == 16


def test_engine_accepts_draft_tokens_from_requantized_drafter(site):
    guest = guest_named(NAME)
    site.choose(checkpoint={"source": "requantized"})
    site.deploy().assert_succeeded()
    proof = guest.proof()
    assert proof["ok"], proof
    [drafts] = [check for check in proof["checks"] if check["name"] == "acceptance"]
    assert drafts["ok"], drafts
    assert "--speculative-config" in guest.argv()
    drafted, accepted = draft_counts(guest)
    numbers = " ".join(map(str, range(1, 21)))
    assert chat(guest, "Count from 1 to 20.", max_tokens=64) == (200, numbers)
    drafted_after, accepted_after = draft_counts(guest)
    drafted, accepted = drafted_after - drafted, accepted_after - accepted
    assert accepted > 0.3 * drafted > 0, (accepted, drafted)
    site.deploy().assert_unchanged()


def draft_counts(guest):
    counts = re.findall(
        r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\S* (\S+)$", guest.metrics(), re.M
    )
    by_name = {name: float(value) for name, value in counts}
    return by_name["draft"], by_name["accepted"]
