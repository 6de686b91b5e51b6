import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_deploy.cli import hosts, main
from spark_deploy.cli import share as command
from spark_deploy.cli.console import Options
from spark_deploy.cli.hosts import Answer, build_plan, select_hosts
from tests import forked
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.cli.test_add import COMMIT, add, make_site, publish
from tests.unit.statuses import host_status

CANARY = "canary-4f9c2d7b1e"


def share(root, choice, *extra):
    return main(["share", choice, "--inventory", str(root / "sparks.py"), *extra])


def share_online(root, out):
    run = command.share.callback.__wrapped__
    options = Options(inventory=str(root / "sparks.py"))
    return int(run(options, choice="tiny/plain", out=str(out), offline=False))


def release_of(root):
    options = Options(inventory=str(root / "sparks.py"), model="tiny", profile="plain")
    return build_plan(select_hosts(options)[0]).release


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    root = tmp_path_factory.mktemp("shared")
    with Hub(root / "hub") as hub, pytest.MonkeyPatch.context() as patch:
        forked.fork_builder(patch)
        publish(hub, "org/tiny")
        site, path = make_site(root / "site", hub), root / "tiny.spark.yml"
        make_site(root / "other", hub)
        assert add(site, "org/tiny") == 0
        assert share(site, "tiny/plain", "--offline", "--out", str(path)) == 0
        yield root


@pytest.fixture
def site(shared, tmp_path):
    return shutil.copytree(shared / "site", tmp_path / "site")


@pytest.fixture
def other(shared, tmp_path):
    return shutil.copytree(shared / "other", tmp_path / "other")


@pytest.fixture
def file(shared, tmp_path):
    return Path(shutil.copy(shared / "tiny.spark.yml", tmp_path))


@pytest.fixture
def edit(file):
    def run(change):
        data = yaml.safe_load(file.read_text())
        change(data)
        file.write_text(yaml.safe_dump(data))

    return run


def test_model_added_from_a_shared_file_has_the_same_release(site, other, file, capsys):
    assert add(other, str(file)) == 0
    out = capsys.readouterr().out
    assert "OPEN        the file contains no check result" in out
    assert "spark-deploy use tiny/plain" in out
    assert release_of(other) == release_of(site)
    assert not (other / "catalog/profiles").exists()


def test_share_json_describes_the_file_and_missing_results(site, tmp_path, capsys):
    settings = site / "group_vars/spark.yml"
    settings.write_text(f"{settings.read_text()}engine: {{max_sequences: 2}}\n")
    path = tmp_path / "a file.yml"
    assert share(site, "tiny/plain", "--offline", "--json", "--out", str(path)) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["file"], result["model"], result["profile"]) == (str(path), "tiny", "plain")
    assert result["sources"]["org/tiny"]["commit"] == COMMIT
    assert (result["left_out"], result["proof"]) == (["engine.max_sequences"], None)
    assert result["next"] == [f"spark-deploy add '{path}'"]


def test_user_profile_is_shared_without_its_base_profile(site, other, tmp_path):
    (site / "catalog/profiles").mkdir(parents=True)
    mine = {"based_on": "plain", "summary": "Mine", "choose_when": "I do", "prefix_caching": True}
    (site / "catalog/profiles/mine.yml").write_text(yaml.safe_dump(mine))
    path = tmp_path / "x.yml"
    assert share(site, "tiny/mine", "--offline", "--out", str(path)) == 0
    assert add(other, str(path)) == 0
    profile = yaml.safe_load((other / "catalog/profiles/mine.yml").read_text())
    assert (profile["prefix_caching"], profile["load_format"]) == (True, "safetensors")
    assert "based_on" not in profile


# Everyone can propose a commit to a public repository; the hub then lists it.
ANOTHER = {"org/another": {"revision": "main", "commit": "5" * 40}}


CODE = [{"set": {"environment": {"VLLM_NCCL_SO_PATH": "/model/x.so"}}}]
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "unknown commit": (lambda data: data["sources"]["org/tiny"].update(commit="6" * 40), ""),
    "repository of another model": (
        lambda data: data["sources"].update(ANOTHER), "neither tiny nor plain uses this repo"
    ),
    "changed shipped profile": (
        lambda data: data["profile"].update(prefix_caching=not data["profile"]["prefix_caching"]),
        "would replace the shipped file",
    ),
    "name of a shipped model": (
        lambda data: data.update(name="qwen3.5-122b"), "would replace the shipped file"
    ),
    "code by option": (
        lambda data: data["profile"].update(options={"worker-cls": "ours.Worker"}),
        "options.worker-cls: this option or variable is not on",
    ),
    "code by variable": (
        lambda data: data["model"].update(changes=CODE),
        "environment.VLLM_NCCL_SO_PATH: this option or variable is not on",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_shared_file_that_would_change_other_models_is_rejected(other, file, edit, case, capsys):
    change, message = CHANGES[case]
    before = (other / "spark.lock.yml").read_bytes()
    edit(change)
    assert add(other, str(file)) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert (other / "spark.lock.yml").read_bytes() == before
    assert not (other / "catalog").exists()
    if message == "would replace the shipped file":
        assert add(other, str(file), "--force") == 0
    elif "list" in message:
        assert add(other, str(file), "--force") == 1


def test_add_reports_that_a_shared_revision_moved(shared, other, file, edit, capsys):
    folder = shared / "hub/api/models/org/tiny/revision"
    (folder / "stable").write_text((folder / "main").read_text().replace("5" * 40, "7" * 40))
    edit(lambda data: data["model"].update(revision="stable"))
    edit(lambda data: data["sources"]["org/tiny"].update(revision="stable"))
    assert add(other, str(file)) == 0
    text = "OPEN        org/tiny: stable is now 777777777777, but the file has 555555555555"
    assert text in capsys.readouterr().out


def test_shared_check_result_does_not_name_the_host(site, other, tmp_path, monkeypatch, capsys):
    proof = {"engine": {"version": "0.33.0"}, "checks": [{"name": "answers"}],
             "versions": {"kernel": CANARY}, "invocation_id": CANARY}  # fmt: skip
    release = {"name": "main-1", "model": "tiny", "profile": "plain", "proof": proof}
    status = host_status({"releases": [release]})
    monkeypatch.setattr(hosts, "query", lambda hosts, _: [Answer(hosts[0], status)])
    path = tmp_path / "proven.yml"
    assert share_online(site, path) == 0
    result = yaml.safe_load(path.read_text())["proof"]
    assert (result["ok"], result["engine"], result["checks"]) == (True, "0.33.0", {"answers": True})
    assert CANARY not in path.read_text()
    assert add(other, str(path)) == 0
    assert "checked by the author: full check of 2020" in capsys.readouterr().out


def test_secrets_in_settings_are_not_shared(site, file, monkeypatch):
    settings = site / "group_vars/spark.yml"
    monkeypatch.setenv("CANARY", CANARY)
    monkeypatch.setenv("A_PROXY", f"http://me:{CANARY}@proxy.example:3128")
    settings.write_text(
        settings.read_text().rstrip().removesuffix("}") + ", token: {env: CANARY}}\n"
        "proxy: {url: {env: A_PROXY}}\n"
        "serve: {api_key: {env: CANARY}, names: [assistant], "
        f"address: {CANARY}.example.org}}\n"
        f"engine: {{environment: {{STUB_NOTE: {CANARY}}}}}\n"
    )
    assert share(site, "tiny/plain", "--offline", "--out", str(file)) == 0
    assert CANARY not in file.read_text()


@pytest.mark.parametrize(
    ("key", "secret"),
    [("summary", "https://me:pass@example.org/"), ("choose_when", "hf_abcdefghijklmnop")],
)
def test_share_rejects_secrets_in_a_catalog_file(site, file, key, secret, capsys):
    path = site / "catalog/models/tiny.yml"
    data = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**data, key: secret}))
    file.unlink()
    assert share(site, "tiny/plain", "--offline", "--out", str(file)) == 1
    err = capsys.readouterr().err
    assert "looks like a secret" in err
    assert secret not in err
    assert not file.exists()
