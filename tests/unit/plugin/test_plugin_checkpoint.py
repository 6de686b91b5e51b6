import json
import shutil
import time
from collections.abc import Callable

import numpy as np
import pytest
from plugin_sources import EXPERTS, LAYERS, write_base
from spark_checkpoint import number_formats
from spark_contract.builder_api import expand_all
from spark_vllm.checkpoint import headers
from spark_vllm.checkpoint.gate import check_checkpoint, find_missing_modules, list_mtp_modules
from spark_vllm.checkpoint.settings import read_settings

from lab.model.safetensors import INDEX
from proofs.trees.build import VARIANTS, build, plan
from spark_deploy.config.catalog.model import HybridModel
from tests.unit.checkpoint.builder_shards import (
    ITEM_BYTES,
    Raw,
    bf16_tensor,
    bf16_values,
    read_shard,
    write_shard,
)
from tests.unit.planning.plans import shipped_catalog

MODEL = "model.language_model."
TEXT = f"{MODEL}layers."
GATE = f"{TEXT}1.mlp.shared_expert.gate_proj"
EXPERT = f"{TEXT}0.mlp.experts.1.up_proj"
DRAFTER_FILE = "model_extra_tensors.safetensors"
PACKED = ("qweight", "scales", "qzeros")
FORMS = [(layout, head) for layout in ("overlay", "full") for head in ("keep", "int8-g128")]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    work = tmp_path_factory.mktemp("built")
    base = write_base(work / "base")
    for layout, head in FORMS:
        choices = {"layout": layout, "head": head, "shared_experts": "fp8-self"}
        build(plan(base, base, work / f"{layout}-{head}", choices), work)
    return work


class Checkpoint:
    def __init__(self, root):
        self.root = root
        self.index: dict[str, str] = json.loads((root / INDEX).read_text())["weight_map"]

    def edit_file(self, file, change):
        tensors = read_shard(self.root / file)
        change(tensors)
        write_shard(self.root / file, tensors)

    def edit_tensor(self, name, change):
        self.edit_file(
            self.index[name], lambda tensors: tensors.update({name: change(tensors[name])})
        )

    def add(self, file, name, raw):
        self.edit_file(file, lambda tensors: tensors.update({name: raw}))

    def remove(self, *names):
        for name in names:
            self.edit_file(self.index.pop(name), lambda tensors, name=name: tensors.pop(name))
        self.write_index()

    def unlist(self, prefix):
        for name in [name for name in self.index if name.startswith(prefix)]:
            del self.index[name]
        self.write_index()

    def list_in(self, file, name):
        self.index[name] = file
        self.write_index()

    def retype(self, name, dtype, shape):
        size = ITEM_BYTES[dtype] * int(np.prod(shape))
        self.edit_tensor(name, lambda _: Raw(dtype, shape, bytes(size)))

    def write_index(self):
        (self.root / INDEX).write_text(json.dumps({"weight_map": self.index}))

    def configure(self, change):
        path = self.root / "config.json"
        config = json.loads(path.read_text())
        change(config["quantization_config"])
        path.write_text(json.dumps(config))

    def configure_module(self, name, **entry):
        self.configure(lambda config: config["extra_config"].update({name: entry}))

    def check(self, mtp_layers=1, layers=LAYERS, experts=EXPERTS):
        config = json.loads((self.root / "config.json").read_text())["quantization_config"]
        sizes = {"layers": layers, "mtp_layers": mtp_layers, "experts": experts}
        check_checkpoint(str(self.root), read_settings(config), **sizes)

    def refused(self, message, **sizes):
        with pytest.raises(ValueError, match=message):
            self.check(**sizes)


@pytest.fixture
def write(built, tmp_path):
    def write(layout="overlay", head="keep"):
        return Checkpoint(shutil.copytree(built / f"{layout}-{head}", tmp_path / "checkpoint"))

    return write


@pytest.mark.parametrize(("layout", "head"), FORMS)
def test_accepts_intact_checkpoints(write, layout, head):
    write(layout, head).check()


def fp8(layout, part):
    return f"{GATE}.{part}" + ("_fp8" if layout == "overlay" else "")


def set_blocks(blocks):
    return lambda tree, _: tree.configure(lambda c: c.update(block_name_to_quantize=blocks))


def cut_file_short(tree, layout):
    path = tree.root / tree.index[fp8(layout, "weight")]
    path.write_bytes(path.read_bytes()[:-16])


def remove_last_layer(tree, _):
    last = f"{TEXT}{LAYERS - 1}."
    tree.configure(lambda config: config["fp8_block"].update(modules=[
        name for name in config["fp8_block"]["modules"] if not name.startswith(last)
    ]))  # fmt: skip
    tree.remove(*[name for name in tree.index if name.startswith(last)])


MISSING = [
    f"{TEXT}1.input_layernorm", f"{TEXT}1.mlp.gate", f"{MODEL}norm", f"{MODEL}embed_tokens",
    "lm_head",
]  # fmt: skip


@pytest.mark.parametrize("module", MISSING)
def test_rejects_a_checkpoint_without_a_module(write, module):
    tree = write()
    tree.remove(f"{module}.weight")
    tree.refused(f"lacks {module}")


DAMAGES: dict[str, tuple[Callable[[Checkpoint, str], object], str]] = {
    "a block scale missing": (
        lambda tree, layout: tree.remove(fp8(layout, "weight_scale_inv")),
        r"lacks .*layers\.1\.mlp\.shared_expert\.gate_proj\.weight_scale_inv",
    ),
    "an FP8 weight still in 16 bits": (
        lambda tree, layout: tree.retype(fp8(layout, "weight"), "BF16", (384, 256)),
        r"gate_proj\.weight\w* is BF16, expected F8_E4M3",
    ),
    "block scales of the wrong shape": (
        lambda tree, layout: tree.retype(fp8(layout, "weight_scale_inv"), "BF16", (2, 3)),
        r"shape \[2, 3\], but a weight of shape \[384, 256\] needs \[3, 2\]",
    ),
    "the drafter's file missing": (
        lambda tree, _: (tree.root / DRAFTER_FILE).unlink(),
        rf"{DRAFTER_FILE}: unreadable",
    ),
    "the drafter's file not in the index": (
        lambda tree, _: tree.unlist("mtp."),
        rf"{INDEX}: lacks mtp\.fc\.weight.*and \d+ more",
    ),
    "two drafter tensors missing": (
        lambda tree, _: tree.remove("mtp.fc.weight", "mtp.layers.0.mlp.experts.1.up_proj.weight"),
        r"lacks mtp\.fc\.weight; .*lacks mtp\.layers\.0\.mlp\.experts\.1\.up_proj\.weight",
    ),
    "scales of an expert missing": (
        lambda tree, _: tree.remove(f"{EXPERT}.scales"),
        r"lacks .*experts\.1\.up_proj\.scales",
    ),
    "packed weight of an expert missing": (
        lambda tree, _: tree.remove(f"{EXPERT}.qweight"),
        r"experts\.1\.up_proj: has scales, but lacks qweight",
    ),
    "an expert missing": (
        lambda tree, _: tree.remove(*(f"{EXPERT}.{part}" for part in PACKED)),
        f"lacks {EXPERT}",
    ),
    "a layer missing": (remove_last_layer, f"lacks all tensors below {TEXT}{LAYERS - 1}."),
    "an expert packed with another width": (
        lambda tree, _: tree.retype(f"{EXPERT}.qweight", "I32", (64, 256)),
        r"qweight \[64, 256\] does not match 4-bit weights",
    ),
    "a name in two files": (
        lambda tree, _: tree.add(
            DRAFTER_FILE, f"{EXPERT}.scales", Raw("F16", (2, 256), bytes(1024))
        ),
        rf"{DRAFTER_FILE}: duplicate .*up_proj\.scales",
    ),
    "a tensor the index does not list": (
        lambda tree, _: tree.add(DRAFTER_FILE, "mtp.stray.weight", Raw("BF16", (2,), bytes(4))),
        rf"mtp\.stray\.weight is not in {INDEX}",
    ),
    "a file cut short": (
        cut_file_short, r"safetensors: unreadable \(it has \d+ bytes, but the header requires",
    ),
    "blocks to quantise do not cover the packed modules": (
        set_blocks("model.visual"), r"is packed, but is 16-bit according to config",
    ),
    "blocks to quantise cover a 16-bit drafter": (
        set_blocks(f"{TEXT[:-1]},mtp.layers"),
        r"mtp\.layers\.0\.self_attn\.q_proj: is 16-bit, but packed according to block_name",
    ),
    "no blocks to quantize": (
        lambda tree, _: tree.configure(lambda c: c.pop("block_name_to_quantize")),
        r"block_name_to_quantize: 'missing'",
    ),
    "half of a fused module listed": (
        lambda tree, _: tree.configure(lambda c: c["fp8_block"]["modules"].remove(GATE)),
        r"lists .*up_proj, but not all shards of .*gate_up_proj",
    ),
    "another block shape": (
        lambda tree, _: tree.configure(lambda c: c["fp8_block"].update(block_shape=[64, 64])),
        r"fp8_block\.block_shape",
    ),
    "asymmetric weights": (
        lambda tree, _: tree.configure(lambda c: c.update(sym=False)),
        r"quantization_config\.sym: False",
    ),
    "an asymmetric module": (
        lambda tree, _: tree.configure_module(EXPERT, bits=4, sym=False),
        rf"extra_config\.{EXPERT}: .*sym true",
    ),
    "another group size for a single module": (
        lambda tree, _: tree.configure_module(EXPERT, bits=4, group_size=64),
        rf"extra_config\.{EXPERT}: .*group_size 128",
    ),
    "8-bit floats for a single module": (
        lambda tree, _: tree.configure_module(EXPERT, bits=8, data_type="fp"),
        rf"extra_config\.{EXPERT}: .*data_type int",
    ),
    "an invalid pattern": (
        lambda tree, _: tree.configure_module("mtp.(", bits=16),
        r"extra_config\.mtp\.\(: .*a name or a regular expression",
    ),
    "an unknown layout": (
        lambda tree, _: tree.configure(lambda c: c["spark"].update(layout="both")),
        r"spark\.layout: 'both', expected overlay or full",
    ),
    "an INT8 head without a config entry": (
        lambda tree, _: tree.configure(lambda c: c["extra_config"].pop("lm_head")),
        r"extra_config\.lm_head is \{\}",
    ),
    "an INT8 head and the old head": (
        lambda tree, _: tree.list_in("model-00002-of-00002.safetensors", "lm_head.weight"),
        r"(lists lm_head\.weight in addition|lacks lm_head\.weight)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["overlay", "full"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_error_names_the_damaged_tensor(write, layout, damage):
    inflict, message = DAMAGES[damage]
    tree = write(layout, "int8-g128")
    inflict(tree, layout)
    tree.refused(message)


SCALES: dict[str, tuple[float, str]] = {
    "a negative block scale": (-11904.0, r"gate_proj\.weight_scale_inv\w*: .*such as -11904"),
    "a block scale of zero": (0.0, r"not positive and finite, such as 0\b"),
    "a block scale that is no number": (float("nan"), r".*such as nan"),
    "a block scale 512 times as large": (512 * 4e-4, r"gate_proj\.weight_scale_inv\w*: scale 0\.2"),
    "a block scale 2**20 times as small": (2**-20 * 4e-4, r"gate_proj\.weight_scale_inv\w*: "),
}


def set_second_scale(value):
    bits = bf16_tensor(np.array([value], np.float32)).data
    return lambda raw: raw._replace(data=raw.data[:2] + bits + raw.data[4:])


@pytest.mark.parametrize("layout", ["overlay", "full"])
@pytest.mark.parametrize("damage", SCALES)
def test_rejects_implausible_scales(write, layout, damage):
    value, message = SCALES[damage]
    tree = write(layout)
    tree.edit_tensor(fp8(layout, "weight_scale_inv"), set_second_scale(value))
    tree.refused(message)


def test_builder_and_plugin_have_the_same_scale_limits() -> None:
    limits = (number_formats._MIN_RATIO, number_formats._MAX_RATIO)
    assert limits == (headers.MIN_SCALE_RATIO, headers.MAX_SCALE_RATIO)


def multiply_scales(factor):
    return lambda raw: bf16_tensor(bf16_values(raw) * np.float32(factor))


@pytest.mark.parametrize("factor", [512, 2**-20])
def test_rejects_a_module_whose_scales_all_differ_from_other_layers(write, factor):
    tree = write("full")
    tree.edit_tensor(fp8("full", "weight_scale_inv"), multiply_scales(factor))
    tree.refused(r"mlp\.shared_expert\.gate_proj\.weight_scale_inv: scale ")


def clear_blocks(*blocks):
    def clear(raw):
        codes = np.frombuffer(raw.data, np.uint8).reshape(raw.shape).copy()
        for number in blocks:
            row, column = divmod(number, 2)
            codes[128 * row : 128 * row + 128, 128 * column : 128 * column + 128] = 0
        return raw._replace(data=codes.tobytes())

    return clear


def test_accepts_any_positive_scale_for_an_all_zero_block(write):
    tree = write("full")
    tree.edit_tensor(fp8("full", "weight"), clear_blocks(1))
    tree.edit_tensor(fp8("full", "weight_scale_inv"), set_second_scale(300.0))
    tree.check()


@pytest.mark.parametrize("scale_of_zeros", [1e-12, 1.0])
def test_accepts_nonzero_blocks_among_mostly_zero_blocks(write, scale_of_zeros):
    def change_scales(raw):
        values = bf16_values(raw).copy()
        values.flat[:5] = scale_of_zeros
        return bf16_tensor(values)

    tree = write("full")
    for layer in range(LAYERS):
        gate = GATE.replace("layers.1.", f"layers.{layer}.")
        tree.edit_tensor(f"{gate}.weight", clear_blocks(0, 1, 2, 3, 4))
        tree.edit_tensor(f"{gate}.weight_scale_inv", change_scales)
    tree.check()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": LAYERS - 1}, f"num_hidden_layers is {LAYERS - 1}"),
        ({"experts": EXPERTS - 1}, f"num_experts is {EXPERTS - 1}"),
    ],
)
def test_rejects_a_config_that_omits_layers_or_experts(write, sizes, message):
    write().refused(message, **sizes)


def test_accepts_negative_int4_scales_from_autoround(write):
    def negate(raw):
        return raw._replace(data=(-np.frombuffer(raw.data, np.float16)).tobytes())

    tree = write()
    tree.edit_tensor(f"{EXPERT}.scales", negate)
    tree.check()


@pytest.mark.parametrize("layout", ["overlay", "full"])
def test_accepts_a_base_that_repeats_tensors_in_earlier_files(tmp_path, layout):
    base = Checkpoint(write_base(tmp_path / "base"))
    for name in (f"{MODEL}norm.weight", "mtp.norm.weight"):
        file = base.root / base.index[name]
        base.add("model-00001-of-00002.safetensors", name, read_shard(file)[name])
    choices = {"layout": layout, "head": "keep", "shared_experts": "fp8-self"}
    build(plan(base.root, base.root, tmp_path / "built", choices), tmp_path)
    Checkpoint(tmp_path / "built").check()


def test_rejects_an_overlay_that_lists_a_module_twice(write):
    tree = write()
    tree.list_in("model-00002-of-00002.safetensors", f"{GATE}.weight")
    tree.refused(r"lists .*gate_proj\.weight in addition")


def test_rejects_a_packed_drafter_without_a_matching_config(write):
    tree = write()
    source = read_shard(tree.root / tree.index[f"{EXPERT}.qweight"])
    for module in [name for name in list_mtp_modules(1, EXPERTS, False) if ".experts." in name]:
        tree.remove(f"{module}.weight")
        for part in PACKED:
            tree.add(DRAFTER_FILE, f"{module}.{part}", source[f"{EXPERT}.{part}"])
            tree.list_in(DRAFTER_FILE, f"{module}.{part}")
    tree.refused("is 16-bit according to config")
    set_blocks(f"{TEXT[:-1]},mtp.layers")(tree, "")
    tree.configure_module(r".*mtp\..*(shared_expert|self_attn).*", bits=16, data_type="float")
    tree.check()


def test_accepts_an_int4_drafter_from_the_builder(tmp_path):
    out = tmp_path / "built"
    base = write_base(tmp_path / "base")
    order = plan(base, base, out, {**VARIANTS["v3"], "shared_experts": "fp8-self"})
    build(order, tmp_path)
    tree = Checkpoint(out)
    tree.check()
    assert len(order["drafter_int4"]) == 3 * EXPERTS + 4
    assert all(tree.index[f"{name}.qweight"] == DRAFTER_FILE for name in order["drafter_int4"])
    shared = "mtp.layers.0.mlp.shared_expert.up_proj"
    tree.configure(lambda config: config["extra_config"].pop(shared))
    tree.refused(f"{shared}: is 16-bit")


def test_requires_drafter_tensors_only_with_a_drafter(write):
    tree = write("full")
    tree.remove(*[name for name in tree.index if name.startswith("mtp.")])
    tree.check(mtp_layers=0)
    tree.refused(r"lacks mtp\.fc\.weight")


def test_drafter_of_the_122b_has_785_tensors():
    assert len(list_mtp_modules(1, 256, False)) == 785
    assert len(list_mtp_modules(1, 512, True)) == 3 * 512 + 29


def test_rejects_a_repository_name_instead_of_a_directory():
    with pytest.raises(ValueError, match="not a directory"):
        check_checkpoint("org/name", None, layers=0, mtp_layers=0, experts=0)


CATALOG = shipped_catalog()
HYBRIDS = {n: model for n, model in CATALOG.models.items() if isinstance(model, HybridModel)}
# Gaps are detected by comparison with another layer of the same kind.
LARGE = [n for n in HYBRIDS if "397b" in n or "flash-next" in n]
COMPARABLE = [n for n, model in HYBRIDS.items() if model.architecture.attention_layers > 1]


@pytest.mark.parametrize(
    "model", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in COMPARABLE]
)
def test_reports_exactly_the_missing_modules_of_a_shipped_model(model):
    names = set(expand_all(HYBRIDS[model].tensors.base))
    shape = HYBRIDS[model].architecture
    started = time.process_time()
    assert list(find_missing_modules(names, shape.layers, shape.experts)) == []
    assert time.process_time() - started < 10
    modules = [
        f"{TEXT}3.self_attn.q_norm",
        f"{TEXT}4.linear_attn.A_log",
        f"{TEXT}4.linear_attn.conv1d",
        f"{TEXT}{shape.layers - 1}.mlp.experts.{shape.experts - 1}.gate_proj",
    ]
    suffixes = ("", ".weight", ".qweight", ".qzeros", ".scales")
    removed = {f"{module}{suffix}" for module in modules for suffix in suffixes} & names
    assert all(any(name.startswith(module) for name in removed) for module in modules)
    assert list(find_missing_modules(names - removed, shape.layers, shape.experts)) == modules


@pytest.mark.parametrize(
    ("tensors", "experts"),
    [
        (("0.linear_attn.a.weight", "1.self_attn.q_proj.qweight", "2.self_attn.q_proj.weight"), 0),
        ((f"{n}.mlp.experts.{part}_proj" for n in range(3) for part in ("gate_up", "down")), 2),
    ],
    ids=["another kind or format", "fused experts"],
)  # fmt: skip
def test_accepts_layers_that_differ_in_kind_or_format(tensors, experts):
    names = {f"{MODEL}norm.weight", f"{MODEL}embed_tokens.weight"}
    names |= {f"{TEXT}{tensor}" for tensor in tensors}
    assert list(find_missing_modules(names, 3, experts)) == []
    assert list(find_missing_modules(names, 4, experts)) == [f"{TEXT}3."]
