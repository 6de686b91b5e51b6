import dataclasses
import os
import subprocess
from types import SimpleNamespace

import pytest
from spark_contract.builder_api import expand_all

from spark_deploy.cli import main, update
from spark_deploy.cli.console import Options
from spark_deploy.cli.hosts import build_plan, select_hosts
from spark_deploy.config.errors import LockError
from spark_deploy.config.settings.load import load_hosts
from spark_deploy.config.settings.patterns import SecretRef
from spark_deploy.inventory.plans import verified_lock, verify_names
from spark_deploy.lock import headers, resolve
from spark_deploy.lock import hub as lookup
from spark_deploy.lock.resolve import read_lock, write_lock
from spark_deploy.lock.types import EMPTY_LOCK, LockedImage
from spark_deploy.plan.jobs import built_title
from tests import forked
from tests.unit.lockfile.hub_trees import (
    BASE,
    CATALOG,
    COMMITS,
    DONOR,
    TENSORS,
    base_entries,
    donor_entries,
    header_bytes,
    modules,
    requested_ranges,
    write_inventory,
    write_repository,
)

BUILD = "lab-tiny, shared experts fp8-donor, head int8-g128"


@pytest.fixture
def settings(hub, tmp_path, monkeypatch):
    forked.fork_builder(monkeypatch)
    overrides = {"model": "lab-tiny", "hub.endpoint": hub.url}
    return load_hosts({"lab": ["a"]}, root=tmp_path, overrides=overrides)["a"].settings


@pytest.fixture
def lock(hub):
    sources = [lookup.look_up_repo(hub.url, repo, "main", None) for repo in (BASE, DONOR)]
    hub.requests.clear()
    return EMPTY_LOCK.with_entries(sources)


def quiet(text):
    pass


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    variables = f"model: lab-tiny\nhub: {{endpoint: '{hub.url}'}}\nlocked: first-use\n"
    write_inventory(folder, variables)
    forked.fork_builder(monkeypatch)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        resolve, "look_up_image", lambda text, **_: LockedImage(text, f"sha256:{'0' * 64}", 1)
    )
    return folder


def test_stores_header_verified_names_in_the_lock(hub, settings, lock, tmp_path):
    output: list[str] = []
    verified = verify_names(settings, CATALOG, lock, output.append)
    result = verified.names[BUILD]
    base, mtp = expand_all(TENSORS.base), expand_all(TENSORS.mtp)
    assert result.base == f"{BASE}@{COMMITS[BASE]}"
    assert result.donor == f"{DONOR}@{COMMITS[DONOR]}"
    assert (result.base_tensors, result.mtp_tensors) == (len(base | mtp), len(mtp))
    assert (result.swapped_modules, result.mtp_from_donor) == (len(modules()), 0)
    [line] = output
    assert f"{BUILD}: 464 names in {BASE} and {result.donor_tensors} names in {DONOR}" in line
    write_lock(tmp_path / "spark.lock.yml", verified)
    assert read_lock(tmp_path / "spark.lock.yml") == verified
    for repo in (BASE, DONOR):
        assert (ranges := requested_ranges(hub, repo))
        assert all(last < header_bytes(path) < path.stat().st_size for path, last in ranges)
    hub.requests.clear()
    assert verify_names(settings, CATALOG, verified, quiet) == verified
    assert hub.requests == []


def without(part):
    return lambda entries: entries.pop(next(name for name in entries if part in name))


def transpose(entries):
    name = f"{next(iter(modules()))}.weight"
    dtype, shape = entries[name]
    entries[name] = (dtype, shape[::-1])


WRONG = {
    "the base lost a name": (BASE, without(".self_attn."), "base tensors: 422 names, expected 423"),
    "the base has another shape": (BASE, transpose, "the plan's donor_shapes require"),
    "the donor lost a scale": (DONOR, without("_proj.weight_scale_inv"), "missing 1"),
    "the donor has another shape": (DONOR, transpose, "the plan's donor_shapes require"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_rejects_sources_that_differ_from_catalog(hub, here, capsys, wrong):
    repo, change, message = WRONG[wrong]
    entries = base_entries() if repo == BASE else donor_entries()
    change(entries)
    write_repository(hub.root, repo, entries)
    for command in ("update", "plan"):
        assert main([command, "inventory.py"]) == 1
        output = capsys.readouterr().err
        assert message in output
        assert "\n  fix: " in output
        assert "Traceback" not in output
    assert not (here / "spark.lock.yml").exists()


def test_planning_needs_no_hub_after_update(hub, here, capsys):
    assert main(["update", "inventory.py", "--check"]) == 1
    assert main(["update", "--missing", "inventory.py"]) == 0
    assert BUILD in read_lock(here / "spark.lock.yml").names
    assert main(["update", "inventory.py", "--check"]) == 0
    hub.requests.clear()
    capsys.readouterr()
    assert main(["plan", "inventory.py"]) == 0
    assert (hub.requests, capsys.readouterr().err) == ([], "")


def test_update_adds_verified_names_to_an_older_lock(hub, here, capsys):
    assert main(["update", "--missing", "inventory.py"]) == 0
    path = here / "spark.lock.yml"
    whole = path.read_text()
    old = whole[: whole.index("names:\n")]
    path.write_text(old)
    capsys.readouterr()
    assert main(["update", "inventory.py", "--check"]) == 1
    assert f"names in {BUILD} have not been verified" in capsys.readouterr().err
    assert main(["plan", "inventory.py"]) == 0
    assert f"{BUILD}: 464 names in {BASE} and " in capsys.readouterr().err
    assert path.read_text() == old
    assert main(["update", "--missing", "inventory.py"]) == 0
    assert path.read_text() == whole


@pytest.mark.parametrize("by_up", [True, False], ids=["up", "update --from-hosts"])
def test_locks_hash_of_donor_tensors_after_first_build(here, capsys, monkeypatch, by_up):
    path = here / "spark.lock.yml"
    assert main(["update", "--missing", "inventory.py"]) == 0
    planned, built_from = [], ["a" * 64]

    def answer(hosts, read):
        for host in hosts:
            [built] = [pair.checkpoint for pair in build_plan(host).served]
            planned.append((built.digest, built.build.donor_sha256))
            job = SimpleNamespace(title=built_title(built), donor_sha256=built_from[0])
            report = SimpleNamespace(jobs=(job,))
            yield host, SimpleNamespace(report=report, release=lambda name: None)

    def read_hosts():
        if by_up:
            update.lock_donor_tensors(select_hosts(Options(inventory="inventory.py")))
            return 0
        return main(["update", "--missing", "--from-hosts", "inventory.py"])

    monkeypatch.setattr(update, "query_or_note", answer)
    assert read_hosts() == 0
    assert read_lock(path).names[BUILD].donor_sha256 == "a" * 64
    whole = path.read_text()
    built_from[0] = "b" * 64
    assert read_hosts() == (0 if by_up else 1)
    assert path.read_text() == whole
    if not by_up:
        assert planned == [(planned[0][0], None), (planned[0][0], "a" * 64)]
        assert "the lock has aaaa" in capsys.readouterr().err


@pytest.mark.slow
def test_names_are_verified_again_after_a_new_commit(hub, settings, lock):
    verified = verify_names(settings, CATALOG, lock, quiet)
    write_repository(hub.root, BASE, base_entries(), commit="3" * 40)
    moved = verified.with_entries([lookup.look_up_repo(hub.url, BASE, "main", None)])
    assert moved.names == {}
    again = verify_names(settings, CATALOG, moved, quiet)
    assert again.names[BUILD].base == f"{BASE}@{'3' * 40}"
    assert again.names[BUILD].base_tensors == verified.names[BUILD].base_tensors


@pytest.mark.slow
def test_changed_catalog_is_verified_again(hub, settings, lock):
    verified = verify_names(settings, CATALOG, lock, quiet)
    model = CATALOG.model("lab-tiny")
    sets = dataclasses.replace(model.tensors, base=(*model.tensors.base, "model.new.weight"))
    changed = dataclasses.replace(model, tensors=sets)
    catalog = dataclasses.replace(CATALOG, models={**CATALOG.models, "lab-tiny": changed})
    with pytest.raises(LockError, match=r"missing 1 \(1 x model\.new\.weight\)"):
        verify_names(settings, catalog, verified, quiet)


def test_deploy_continues_if_the_hub_is_unreachable(hub, settings, lock, tmp_path):
    path, output = tmp_path / "spark.lock.yml", []
    hub.fault = lambda handler, path, data: handler.answer(404, b"") or True
    assert verified_lock(settings, CATALOG, path, lock, output.append) == lock
    assert not path.exists()
    [line] = output
    assert line.startswith("could not compare tensor names with the catalog: ")
    assert "the server returned 404" in line
    hub.fault = None
    assert verified_lock(settings, CATALOG, path, lock, output.append) == read_lock(path)
    assert BUILD in read_lock(path).names


def test_requiring_a_lock_needs_no_hub(hub, settings, lock, tmp_path):
    output: list[str] = []
    strict = dataclasses.replace(settings, locked="required")
    assert verified_lock(strict, CATALOG, tmp_path / "spark.lock.yml", lock, output.append) == lock
    assert hub.requests == []
    [message] = output
    assert BUILD in message
    assert "`spark-deploy update --missing`" in message


def test_does_not_verify_names_for_profiles_without_a_build(hub, settings, lock):
    base = dataclasses.replace(settings, profile="base")
    assert verify_names(base, CATALOG, lock, quiet) == lock
    assert hub.requests == []


def test_token_is_sent_only_to_the_hub(hub, settings, lock, tmp_path, monkeypatch):
    canary, outputs, folders = "hf_canary0123456789", [], []
    monkeypatch.setenv("CANARY_TOKEN", canary)
    real = headers.subprocess.run

    def run(argv, **more):
        folders.append(more["cwd"])
        outputs.extend([*argv, (more["cwd"] / "plan.json").read_text()])
        assert (more["cwd"] / "token").stat().st_mode & 0o777 == 0o600
        return real(argv, **more)

    monkeypatch.setattr(headers.subprocess, "run", run)
    secret = dataclasses.replace(settings.hub, token=SecretRef(env="CANARY_TOKEN"))
    verified = verify_names(
        dataclasses.replace(settings, hub=secret), CATALOG, lock, outputs.append
    )
    write_lock(tmp_path / "spark.lock.yml", verified)
    outputs.append((tmp_path / "spark.lock.yml").read_text())
    sent = {headers.get("Authorization") for _, headers, _ in hub.requests}
    assert sent == {f"Bearer {canary}"}
    assert not [text for text in outputs if canary in text]
    assert not any(os.path.exists(folder) for folder in folders)


def test_ignores_python_files_in_the_working_directory(hub, settings, lock, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the folder was run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(headers, "subprocess", subprocess)
    assert BUILD in verify_names(settings, CATALOG, lock, quiet).names


def test_reports_killed_header_reader_in_one_line(settings, lock, monkeypatch):
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(headers.subprocess, "run", lambda *_, **__: killed)
    with pytest.raises(LockError, match="the header reader exited with -9") as caught:
        verify_names(settings, CATALOG, lock, quiet)
    assert len(caught.value.problems) == 1
