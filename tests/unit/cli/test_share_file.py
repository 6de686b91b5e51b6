"""``spark-deploy share`` and ``add FILE``: the same release elsewhere, and no secrets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_deploy.cli import hosts, main
from spark_deploy.cli import share as command
from spark_deploy.cli.hosts import Answer, build_plan, select_hosts
from spark_deploy.cli.options import Options
from tests import forked
from tests.unit.checkpoint.builder_hub import Hub
from tests.unit.cli.test_add import COMMIT, CONFIG, add, make_site, publish
from tests.unit.statuses import told

CANARY = "canary-4f9c2d7b1e"


def share(root: Path, choice: str, *extra: str) -> int:
    return main(["share", choice, "--inventory", str(root / "sparks.py"), *extra])


def share_online(root: Path, out: Path) -> int:
    """Not by main(), which would patch this whole process by gevent."""
    run = command.share.callback.__wrapped__
    options = Options(inventory=str(root / "sparks.py"))
    return int(run(options, choice="tiny/plain", out=str(out), unasked=False))


def release_of(root: Path, model: str) -> Any:
    options = Options(
        inventory=str(root / "sparks.py"), model=model, profile="plain",
    )  # fmt: skip
    result = select_hosts(options)
    return build_plan(result[0]).serve


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of two owners; the first added and shared a model."""
    root = tmp_path_factory.mktemp("shared")
    with Hub(root / "hub") as hub, pytest.MonkeyPatch.context() as patch:
        forked.fork_builder(patch)
        publish(hub, "org/tiny", CONFIG, tokenizer_config__json={"chat_template": "x"})
        site, path = make_site(root / "site", hub), root / "tiny.spark.yml"
        make_site(root / "other", hub)
        assert add(site, "org/tiny") == 0
        assert share(site, "tiny/plain", "--unasked", "--out", str(path)) == 0
        yield root


@pytest.fixture
def site(shared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shared / "site", tmp_path / "site")


@pytest.fixture
def other(shared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shared / "other", tmp_path / "other")


@pytest.fixture
def file(shared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(shared / "tiny.spark.yml", tmp_path))


def test_what_is_shared_is_the_same_release_elsewhere(
    site: Path, other: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert add(other, str(file)) == 0
    text = capsys.readouterr().out
    assert "OPEN        shared without a check result" in text
    assert "spark-deploy use tiny/plain" in text
    assert release_of(other, "tiny") == release_of(site, "tiny")
    assert not (other / "catalog/profiles").exists(), "ours says the same"


def test_a_script_reads_what_the_file_holds_and_that_it_proves_nothing(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = site / "group_vars/spark.yml"
    settings.write_text(f"{settings.read_text()}engine: {{max_sequences: 2}}\n")
    path = tmp_path / "a file.yml"
    capsys.readouterr()
    assert share(site, "tiny/plain", "--unasked", "--json", "--out", str(path)) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["file"], result["model"], result["profile"]) == (str(path), "tiny", "plain")
    assert result["sources"]["org/tiny"]["commit"] == COMMIT
    assert result["left_out"] == ["engine.max_sequences"]
    assert (result["proof"], result["unproven"]) == (None, command._UNPROVEN)
    assert result["fetched_bytes"] > 0
    assert result["next"] == [f"spark-deploy add '{path}'"]


def test_a_host_that_cannot_be_asked_for_a_proof_is_named(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = "cannot be reached: no route to host"
    monkeypatch.setattr(hosts, "query", lambda hosts, ask: [Answer(hosts[0], None, away)])
    assert share_online(site, tmp_path / "x.yml") == 0
    assert f"a: {away}" in capsys.readouterr().err


def test_a_profile_of_ones_own_goes_with_it(site: Path, other: Path, tmp_path: Path) -> None:
    (site / "catalog/profiles").mkdir(parents=True)
    mine = {"based_on": "plain", "summary": "Mine", "choose_when": "I do", "prefix_caching": True}
    (site / "catalog/profiles/mine.yml").write_text(yaml.safe_dump(mine))
    path = tmp_path / "x.yml"
    assert share(site, "tiny/mine", "--unasked", "--out", str(path)) == 0
    assert add(other, str(path)) == 0
    taken = yaml.safe_load((other / "catalog/profiles/mine.yml").read_text())
    assert (taken["prefix_caching"], taken["load_format"]) == (True, "safetensors")
    assert "based_on" not in taken, "it stands alone"


def test_a_commit_that_the_hub_does_not_confirm_is_refused_and_nothing_is_written(
    other: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (other / "spark.lock.yml").read_bytes()
    data = yaml.safe_load(file.read_text())
    data["sources"]["org/tiny"]["commit"] = "6" * 40
    file.write_text(yaml.safe_dump(data))
    assert add(other, str(file)) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert (other / "spark.lock.yml").read_bytes() == before
    assert not (other / "catalog").exists()


def test_a_repository_of_another_model_is_not_locked_by_a_stranger(
    other: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everyone can propose a commit to a public repository; the hub then lists it."""
    before = (other / "spark.lock.yml").read_bytes()
    data = yaml.safe_load(file.read_text())
    data["sources"]["org/another"] = {"revision": "main", "commit": "5" * 40}
    file.write_text(yaml.safe_dump(data))
    assert add(other, str(file)) == 1
    assert "neither tiny nor plain names this repository" in capsys.readouterr().err
    assert (other / "spark.lock.yml").read_bytes() == before
    assert not (other / "catalog").exists()


def test_a_commit_that_its_revision_is_not_at_is_told(
    shared: Path, other: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared / "hub/api/models/org/tiny/revision"
    moved = (folder / "main").read_text().replace("5" * 40, "7" * 40)
    (folder / "stable").write_text(moved)
    data = yaml.safe_load(file.read_text())
    data["model"]["revision"] = data["sources"]["org/tiny"]["revision"] = "stable"
    file.write_text(yaml.safe_dump(data))
    assert add(other, str(file)) == 0
    text = "OPEN        org/tiny: stable is now 777777777777, shared at 555555555555"
    assert text in capsys.readouterr().out


def test_a_profile_of_ours_is_replaced_by_a_strangers_only_when_told_so(
    other: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = yaml.safe_load(file.read_text())
    data["profile"]["prefix_caching"] = not data["profile"].get("prefix_caching", False)
    file.write_text(yaml.safe_dump(data))
    assert add(other, str(file)) == 1
    assert "which other models use" in capsys.readouterr().err
    assert not (other / "catalog").exists()
    assert add(other, str(file), "--force") == 0


def test_a_proof_is_told_without_the_host_it_is_of(
    site: Path, other: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    proof = {"engine": {"version": "0.33.0"}, "checks": [{"name": "answers"}],
             "versions": {"kernel": CANARY}, "invocation_id": CANARY}  # fmt: skip
    status = told({"releases": [{"name": "main-1", "model": "tiny", "profile": "plain",
                                 "proof": proof}]})  # fmt: skip
    monkeypatch.setattr(hosts, "query", lambda hosts, ask: [Answer(hosts[0], status)])
    path = tmp_path / "proven.yml"
    assert share_online(site, path) == 0
    result = yaml.safe_load(path.read_text())["proof"]
    assert (result["ok"], result["engine"], result["checks"]) == (True, "0.33.0", {"answers": True})
    assert CANARY not in path.read_text()
    capsys.readouterr()
    assert add(other, str(path)) == 0
    assert "checked by the author: full check of 2020" in capsys.readouterr().out


def test_no_secret_of_the_settings_has_a_way_into_the_file(
    site: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = site / "group_vars/spark.yml"
    monkeypatch.setenv("CANARY", CANARY)
    monkeypatch.setenv("A_PROXY", f"http://me:{CANARY}@proxy.example:3128")
    settings.write_text(
        settings.read_text().rstrip().removesuffix("}") + ", token: {env: CANARY}}\n"
        "proxy: {https: {env: A_PROXY}}\n"
        "serve: {api_key: {env: CANARY}, names: [assistant], "
        f"address: {CANARY}.example.org}}\n"
        f"engine: {{environment: {{X_NOTE: {CANARY}}}}}\n"
    )
    assert share(site, "tiny/plain", "--unasked", "--out", str(file)) == 0
    assert CANARY not in file.read_text()


@pytest.mark.parametrize(
    "environment",
    [{"A_URL": "https://me:pass@example.org/"}, {"A_NOTE": "hf_abcdefghijklmnop"}],
    ids=["login", "token"],
)
def test_what_looks_like_a_secret_in_a_catalog_file_is_refused(
    site: Path, file: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = site / "catalog/models/tiny.yml"
    data = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**data, "changes": [{"set": {"environment": environment}}]}))
    file.unlink()
    assert share(site, "tiny/plain", "--unasked", "--out", str(file)) == 1
    text = capsys.readouterr().err
    assert "looks like a secret" in text
    assert not any(value in text for value in environment.values())
    assert not file.exists()
