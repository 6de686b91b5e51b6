"""A repository unknown to the catalog is added and served with the documented commands.

The stub engine serves it, so the weights are a single norm.
"""

import json
import re
import shutil
import struct

import pytest
import yaml

from tests.labkit import SPARE, STATE, guest_named, lab
from tests.owner import new_owner, typed_commands

NAME, MODEL = "somebody/new-4b", "new-4b"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "vocab_size": 1024,
}  # fmt: skip


def publish(store):
    commit = "5" * 40
    tree = store / NAME / commit
    tree.mkdir(parents=True)
    tiny = STATE / "hub/lab/tiny-int4"
    head = (tiny / "refs/main").read_text().strip()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / head / name, tree / name)
    (tree / "config.json").write_text(json.dumps(CONFIG))
    tensor = {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}
    header = json.dumps({"model.norm.weight": tensor}).encode()
    packed = struct.pack("<Q", len(header)) + header + bytes(128)
    (tree / "model.safetensors").write_bytes(packed)
    (store / NAME / "refs").mkdir()
    (store / NAME / "refs/main").write_text(f"{commit}\n")


@pytest.fixture(scope="module")
def owner(tmp_path_factory):
    lab("up", SPARE[0], "--fresh", "--bootstrap-guest", SPARE[0], "--engine", "stub")
    shutil.rmtree(STATE / "hub" / NAME, ignore_errors=True)
    publish(STATE / "hub")
    owner, _ = new_owner(tmp_path_factory.mktemp("owner"), SPARE[0])
    group_vars = owner.folder / "group_vars/spark.yml"
    settings = yaml.safe_load(group_vars.read_text())
    settings["images"]["engine"] = settings["images"].pop("stub_engine")
    group_vars.write_text(yaml.safe_dump(settings))
    yield owner
    shutil.rmtree(STATE / "hub" / NAME)


def test_two_commands_add_and_serve_a_model(owner):
    before, [add, up_words] = len(owner.commands), typed_commands("add a model", repository=NAME)
    added = owner.run(*add)
    assert added.returncode == 0, added.stdout + added.stderr
    settings = (owner.folder / "group_vars/all.yml").read_text()
    assert re.search(rf"^model: {MODEL}\b", settings, re.M)
    assert re.search(r"^profile: plain\b", settings, re.M)

    up = owner.run(*up_words, "-y")
    assert up.returncode == 0, up.stdout[-4000:] + up.stderr[-2000:]
    assert (len(owner.commands) - before, owner.edits) == (2, 0)
    guest = guest_named(SPARE[0])
    assert guest.answers()
    assert guest.run("cat /srv/spark/sources/*/model.safetensors | wc -c").strip() != "0"


def test_plan_reports_files_already_on_the_host(owner):
    result = owner.run("plan", "--on-host", "--json")
    assert result.returncode == 0, result.stderr
    [plan] = json.loads(result.stdout)
    assert plan["reuse"]["whole_bytes"] > 0
