import errno
import json
import shlex

import pytest
import yaml

from spark_deploy.cli import main
from spark_deploy.cli.init import INVENTORY_TEXT
from spark_deploy.cli.settings import set_keys
from tests.unit.cli.targets import write_inventory

ALL = """\
# Settings of both.
model: qwen3.5-35b   # small enough
profile: v2  # fast
memory: {reserve_gib: 13}
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    write_inventory(tmp_path / "inventory/spark.py", "a", "b")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text(ALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_use_changes_only_the_line_of_the_key(site, capsys):
    assert main(["use", "agent"]) == 0
    assert (site / "group_vars/all.yml").read_text() == ALL.replace("v2  #", "agent  #")
    text = capsys.readouterr()
    assert "profile: v2 → agent (a, b)" in text.out
    assert "spark-deploy up a b" in text.err


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "with a mark of byte order"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["", "of Windows"])
def test_use_keeps_line_endings_and_never_duplicates_a_key(site, mark, end):
    common, own = site / "group_vars/all.yml", site / "host_vars/b.yml"
    common.write_bytes(mark + ALL.encode().replace(b"\n", end))
    own.parent.mkdir()
    own.write_bytes(mark + b"profile: base" + end)
    assert main(["use", "qwen3.5-122b/agent"]) == 0
    changed = ALL.replace("qwen3.5-35b", "qwen3.5-122b").replace("v2  #", "agent  #")
    assert common.read_bytes() == mark + changed.encode().replace(b"\n", end)
    assert own.read_bytes() == mark + b"profile: agent" + end


@pytest.mark.parametrize("has_schema", [True, False])
def test_use_writes_a_choice_for_one_host_to_its_host_vars(site, has_schema):
    head = "# yaml-language-server: $schema=../schema/settings.schema.json\n" * has_schema
    if has_schema:
        (site / "schema").mkdir()
        (site / "schema/settings.schema.json").write_text("{}")
    for profile in ("agent", "v2"):
        assert main(["use", profile, "b"]) == 0
        assert (site / "host_vars/b.yml").read_text() == f"{head}profile: {profile}\n"
    assert (site / "group_vars/all.yml").read_text() == ALL


def test_use_writes_nothing_in_a_dry_run_or_without_a_change(site, capsys):
    assert main(["use", "agent", "--dry"]) == 0
    assert "v2 → agent" in capsys.readouterr().out
    assert main(["use", "v2"]) == 0
    assert "already set" in capsys.readouterr().err
    assert (site / "group_vars/all.yml").read_text() == ALL


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{model: qwen3.5-35b, profile: v2}\n", "{model: qwen3.5-35b, profile: agent}\n"),
        ("model: qwen3.5-35b\nprofile:\n  'v2'\n", "model: qwen3.5-35b\nprofile:\n  agent\n"),
        ("# none\n", "# none\nprofile: agent\n"),
        ("---\n# none\n", "---\n# none\nprofile: agent\n"),
        ("# none\n\n\n", "# none\n\n\nprofile: agent\n"),
        ("", "profile: agent\n"),
    ],
)
def test_use_edits_every_yaml_style_in_place(site, before, after):
    (site / "group_vars/all.yml").write_text(before)
    (site / "group_vars/spark.yml").write_text("lock_file: spark.lock.yml\n")
    assert main(["use", "agent"]) == 0
    assert (site / "group_vars/all.yml").read_text() == after


@pytest.mark.parametrize(
    "text", ["model: &m v2\nprofile: *m\n", "--- {}\n--- {profile: v2}\n", "null\n"]
)
def test_use_rejects_values_that_it_cannot_edit_in_place(text):
    assert set_keys(text, {"profile": "agent"}) is None


@pytest.mark.parametrize("present", ["qwen3.5-397b", "nobody-has-this"])
def test_use_replaces_a_choice_that_the_host_cannot_serve(site, present):
    (site / "group_vars/all.yml").write_text(ALL.replace("qwen3.5-35b ", f"{present} "))
    assert main(["use", "qwen3.5-122b"]) == 0
    assert "model: qwen3.5-122b " in (site / "group_vars/all.yml").read_text()


def test_use_does_not_check_settings_of_other_hosts(site, capsys):
    (site / "host_vars").mkdir()
    (site / "host_vars/a.yml").write_text("model: qwen3.5-397b\n")
    assert main(["use", "agent", "b"]) == 0
    capsys.readouterr()
    assert main(["use", "agent", "a"]) == 1
    assert "does not fit" in capsys.readouterr().err


def test_use_rejects_a_choice_that_conflicts_with_other_settings(site, capsys):
    night = "schedule: [{at: '20:00', model: qwen3.5-35b, profile: v2}]\n"
    (site / "host_vars").mkdir()
    (site / "host_vars/b.yml").write_text(night)
    assert main(["use", "agent", "a"]) == 0
    assert main(["use", "agent", "b"]) == 1
    assert (
        "b: schedule: no entry switches back to qwen3.5-35b with agent" in capsys.readouterr().err
    )


def test_use_replaces_a_plain_profile_with_the_recommended_profile(site, capsys):
    common = site / "group_vars/all.yml"
    common.write_text("model: qwen3-4b\nprofile: plain\n")
    assert main(["use", "qwen3.5-35b"]) == 0
    assert common.read_text() == "model: qwen3.5-35b\nprofile: v2\n"
    assert "profile v2" in capsys.readouterr().err
    common.write_text("model: qwen3.5-35b\nprofile: agent\n")
    assert main(["use", "qwen3.5-122b"]) == 0
    assert common.read_text() == "model: qwen3.5-122b\nprofile: agent\n"
    assert "profile agent" in capsys.readouterr().err


def test_use_replaces_a_plain_profile_for_a_model_on_several_hosts(site):
    (site / "group_vars/all.yml").write_text("model: qwen3-4b\nprofile: plain\n")
    four = ("--inventory", "four.py")
    write_inventory(site / "four.py", "a", "b", "c", "d")
    assert main(["set", "cluster.hosts=[a, b, c, d]", "model=qwen3.5-122b", *four]) == 0
    assert main(["use", "qwen3.5-397b", *four]) == 0
    chosen = yaml.safe_load((site / "group_vars/all.yml").read_text())
    assert (chosen["model"], chosen["profile"]) == ("qwen3.5-397b", "v2")


def test_engine_settings_that_override_a_new_profile_are_listed(site, capsys):
    (site / "group_vars/all.yml").write_text(f"{ALL}engine: {{drafts: 0, options: {{seed: 1}}}}\n")
    assert main(["use", "agent"]) == 0
    text = capsys.readouterr().err
    assert "engine.drafts: 0" in text
    command = next(line for line in text.splitlines() if " set engine." in line)
    assert main(shlex.split(command.partition("`spark-deploy ")[2].rstrip("`"))) == 0
    capsys.readouterr()
    assert main(["use", "v2"]) == 0
    assert "engine." not in capsys.readouterr().err


def test_different_engine_settings_of_hosts_are_all_listed(site, capsys):
    (site / "group_vars/all.yml").write_text(f"{ALL}engine: {{drafts: 0}}\n")
    (site / "host_vars").mkdir(exist_ok=True)
    (site / "host_vars/b.yml").write_text("engine: {drafts: 1}\n")
    assert main(["use", "agent"]) == 0
    text = capsys.readouterr().err
    assert "engine.drafts: 0" in text
    assert "engine.drafts: 1" in text


@pytest.mark.parametrize("words", ["use lab-x", "plan --model lab-x", "connect --data model=lab-x"])
def test_suggestions_for_an_unknown_name_exclude_lab_models(words, site, capsys):
    assert main(words.split()) == 1
    text = capsys.readouterr().err
    assert "lab-tiny" not in text
    assert "qwen3.5-122b" in text


def test_use_json_lists_the_edits(site, capsys):
    assert main(["use", "agent", "--json", "--dry"]) == 0
    [edit] = json.loads(capsys.readouterr().out)
    assert (edit["file"], edit["key"]) == (str(site / "group_vars/all.yml"), "profile")
    assert (edit["before"], edit["after"], edit["hosts"]) == ("v2", "agent", ["a", "b"])


NESTED = """\
serve:  # how
  # the port
  port: 8000  # usual

  # who
  expose: loopback
keep_ready:
  - {model: m, profile: agent}
  # end
memory:
ssh: {user: me}  # login
"""
EDITED = """\
serve:  # how
  # the port
  port: 8001  # usual

  # who
  expose: loopback
  names: [a, b]
keep_ready:
  []
  # end
memory: {reserve_gib: 13}
ssh: {port: 2222, user: me}  # login
watch: {stall_s: 400}
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_set_edits_nested_values_and_keeps_comments(end):
    values = {
        "serve.port": "8001", "serve.names": "[a, b]", "keep_ready": "[]",
        "memory.reserve_gib": "13", "ssh.port": "2222", "watch.stall_s": "400",
    }  # fmt: skip
    assert set_keys(NESTED.replace("\n", end), values) == EDITED.replace("\n", end)


def test_set_writes_valid_values_for_selected_hosts(site, capsys):
    assert main(["set", "serve.expose=lan", "serve.port=8001", "--dry"]) == 0
    assert (site / "group_vars/all.yml").read_text() == ALL
    assert main(["set", "serve.expose=lan", "serve.names=[x, y]"]) == 0
    assert main(["set", "serve.port=8002", "b"]) == 0
    common = yaml.safe_load((site / "group_vars/all.yml").read_text())
    assert common["serve"] == {"expose": "lan", "names": ["x", "y"]}
    assert yaml.safe_load((site / "host_vars/b.yml").read_text()) == {"serve": {"port": 8002}}
    capsys.readouterr()
    assert main(["set", "serve.port=8002", "b"]) == 0
    assert "already set" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "use qwen3.5-397b", "set serve.expose=world", "set serve.prot=1", "set serve.port=x",
        "set model=qwen3.5-397b", "set a=",
    ],
)  # fmt: skip
def test_set_rejects_invalid_values_without_writing(site, capsys, words):
    assert main(words.split()) == 1
    assert "fix: " in capsys.readouterr().err
    assert (site / "group_vars/all.yml").read_text() == ALL
    assert not (site / "host_vars").exists()


@pytest.mark.parametrize("old", ["max_sequences", "max_num_seqs"])
@pytest.mark.parametrize("new", ["max_sequences", "max_num_seqs"])
def test_set_replaces_an_engine_setting_under_either_of_its_names(site, capsys, old, new):
    (site / "group_vars/all.yml").write_text(f"{ALL}engine: {{{old}: 3}}\n")
    assert main(["set", f"engine.{new}=2"]) == 0
    assert (site / "group_vars/all.yml").read_text() == f"{ALL}engine: {{{old}: 2}}\n"
    capsys.readouterr()
    assert main(["set", f"engine.{new}=2"]) == 0
    assert "already set" in capsys.readouterr().err


def test_failed_write_is_printed_as_json(site, monkeypatch, capsys):
    def fail(path, *_):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("spark_contract.files.write_text", fail)
    assert main(["set", "serve.port=8001", "--json"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["errors"]
    assert problem == {
        "where": str(site / "group_vars/all.yml"),
        "what": "Read-only file system",
        "fix": "check path and permissions",
    }


@pytest.mark.parametrize("option", ["--model", "--profile"])
def test_empty_choice_is_rejected(site, capsys, option):
    assert main(["plan", "--estimate", option, ""]) == 1
    assert f"{option}: " in capsys.readouterr().err


def test_set_writes_replica_hosts_with_their_addresses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path, text in {
        "inventory/spark.py": INVENTORY_TEXT,
        "group_vars/all.yml": ALL,
        "hosts.yml": "hosts: {a: {address: 10.0.0.1}, b: {address: 10.0.0.2}}\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    words = ["set", "serve.expose=lan", "serve.api_key={env: SPARK_API_KEY}"]
    assert main([*words, "replicas.hosts=[a, spark-2]"]) == 1
    assert "spark-2" in capsys.readouterr().err
    assert main([*words, "replicas.hosts=[a, b]"]) == 0
    common = yaml.safe_load((tmp_path / "group_vars/all.yml").read_text())
    assert common["replicas"] == {"hosts": ["a", "b"]}


@pytest.mark.parametrize("section", ["cluster", "replicas"])
def test_set_rejects_cluster_or_replica_hosts_missing_from_the_inventory(site, capsys, section):
    common = site / "group_vars/all.yml"
    common.write_text(f"{ALL}serve: {{expose: lan, api_key: {{env: KEY}}}}\n")
    assert main(["set", f"{section}.hosts=[spark-1, spark-2]"]) == 1
    assert "choose from: a, b" in capsys.readouterr().err
    common.write_text(f"{common.read_text()}{section}: {{hosts: [spark-1, spark-2]}}\n")
    for hosts in ([], ["a"]):
        assert main(["plan", "--estimate", *hosts]) == 1
        assert f"{section}.hosts: not in the inventory: spark-1, spark-2" in capsys.readouterr().err


def test_settings_prints_the_values_for_the_current_folder(site, capsys):
    assert main(["set", "serve.expose=lan"]) == 0
    (site / "host_vars").mkdir()
    (site / "host_vars/b.yml").write_text("serve: {expose: loopback, port: 8001}\n")
    capsys.readouterr()
    assert main(["settings", "serve.expose"]) == 0
    text = capsys.readouterr().out
    assert "yours: serve.expose: lan (group_vars/all.yml)" in text
    assert "host_vars" not in text
    assert yaml.safe_load(text) == {"serve": {"expose": "loopback"}}


def test_settings_prints_matching_keys_with_their_sections(capsys):
    assert main(["settings", "serve.port"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == {"serve": {"port": 8000}}
    assert "#" in text
    assert main(["settings", "expose", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"serve.expose": "loopback"}
    assert main(["settings", "exposed"]) == 1
    assert "did you mean expose?" in capsys.readouterr().err
