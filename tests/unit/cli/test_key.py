import hashlib
import json
import re
from types import SimpleNamespace

import pytest
import yaml

from spark_deploy.cli import key, main
from spark_deploy.cli.hosts import Answer
from tests.unit.cli.targets import write_inventory
from tests.unit.statuses import host_status

ALL = "# Settings of both.\nmodel: qwen3.5-35b   # small\nserve:\n  port: 8001  # ours\n"
TOKEN = r"sk-[A-Za-z0-9_-]{43}"


@pytest.fixture
def site(tmp_path, monkeypatch):
    write_inventory(tmp_path / "inventory/spark.py", "a", "b")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text(ALL)
    monkeypatch.chdir(tmp_path)
    deployed = []

    def deploy(command, hosts, options, **_):
        deployed.append({host.name: dict(host.settings.serve.keys) for host in hosts})
        return 0

    monkeypatch.setattr(key, "deploy", deploy)
    return SimpleNamespace(root=tmp_path, deployed=deployed)


def keys_in(site, file="group_vars/all.yml"):
    return yaml.safe_load((site.root / file).read_text()).get("serve", {}).get("keys")


def add(capsys, *words):
    assert main(["key", "add", *words, "-y"]) == 0
    text = capsys.readouterr()
    return text.out.strip(), text.err


def test_key_add_prints_the_key_once_and_deploys_only_its_digest(site, capsys):
    words = "anna --concurrent 4 --per-minute 60 --body-mib 2 --output-tokens 512"
    token, err = add(capsys, *words.split())
    assert re.fullmatch(TOKEN, token)
    digest = hashlib.sha256(token.encode()).hexdigest()
    entry = {"sha256": digest, "max_concurrent": 4, "max_requests_per_min": 60, "max_body_mib": 2}
    entry["max_output_tokens"] = 512
    assert keys_in(site) == {"anna": entry}
    assert (site.root / "group_vars/all.yml").read_text().startswith(ALL)
    assert [{name: list(keys) for name, keys in hosts.items()} for hosts in site.deployed] == [
        {"a": ["anna"], "b": ["anna"]}
    ]
    assert "deploys/key.py" in err
    assert token not in err
    for path in site.root.rglob("*"):
        assert path.is_dir() or token.encode() not in path.read_bytes()


def test_revoking_a_key_keeps_all_other_keys(site, capsys):
    add(capsys, "anna")
    add(capsys, "bob", "a")
    bob = keys_in(site, "host_vars/a.yml")
    assert main(["key", "revoke", "anna", "-y"]) == 0
    assert (keys_in(site), keys_in(site, "host_vars/a.yml")) == ({}, bob)
    assert [list(keys) for keys in site.deployed[-1].values()] == [["bob"], []]
    assert "# ours" in (site.root / "group_vars/all.yml").read_text()
    assert main(["key", "revoke", "bob", "-y"]) == 0
    assert {len(keys) for keys in site.deployed[-1].values()} == {0}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("add",), "no name given"), (("revoke", "nobody"), "no settings file contains this key"),
        (("add", "anna"), "already exists"), (("add", "Anna B"), "lowercase letters"),
        (("revoke", "anna", "a"), "applies to all hosts"),
    ],
)  # fmt: skip
def test_invalid_key_names_change_nothing(site, capsys, words, reason):
    add(capsys, "anna")
    before = keys_in(site)
    assert main(["key", *words, "-y"]) == 1
    text = capsys.readouterr()
    assert reason in text.err
    assert "fix:" in text.err
    assert not re.search(TOKEN, text.out + text.err)
    assert (keys_in(site), len(site.deployed)) == (before, 1)


@pytest.mark.parametrize("words", [("add", "bob"), ("revoke", "anna")])
@pytest.mark.parametrize("flag", ["--dry", None])
def test_key_commands_change_nothing_without_confirmation_or_in_a_dry_run(
    site, capsys, words, flag
):
    add(capsys, "anna")
    before = keys_in(site)
    code = main(["key", *words, *[flag] * bool(flag)])
    text = capsys.readouterr()
    assert (code, "confirmation" in text.err) == ((0, False) if flag else (1, True))
    assert not re.search(TOKEN, text.out)
    assert (keys_in(site), len(site.deployed)) == (before, 1)


def test_key_list_shows_limits_and_usage_of_each_host(site, capsys, monkeypatch):
    add(capsys, "anna", "--concurrent", "4", "--output-tokens", "512")
    add(capsys, "bob")
    usage = {"requests": 1200, "received_bytes": 2_000_000, "sent_bytes": 3 * 10**9}
    services = {name: {"gateway": {"usage": {"anna": usage}}} for name in ("main", "embed")}
    status = host_status({"services": services})
    monkeypatch.setattr(
        key, "query", lambda hosts, _: [Answer(hosts[0], status), Answer(hosts[1], None, "is off")]
    )
    assert main(["key", "list", "--json"]) == 1
    a, b = json.loads(capsys.readouterr().out)
    assert a["keys"]["anna"]["usage"] == {name: 2 * count for name, count in usage.items()}
    assert (a["keys"]["anna"]["max_concurrent"], a["keys"]["bob"]["usage"]) == (4, None)
    assert b["problem"] == "is off"
    assert main(["key", "list"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"anna +4 concurrent, 512 output tokens per request; 2,400 requests, ", text)
    assert "4.00 MB received, 6.00 GB sent" in text
    assert re.search(r"bob +no limits; not used", text)
