import os
import subprocess
from pathlib import Path

import pytest
from prune_machine import BASE, RUN, A, B, C, D, add_generations, names, write_json
from spark_contract import files
from spark_contract.documents import DocumentError
from spark_contract.tool import HostToolError
from spark_host.cleanup import prune, resources
from spark_host.records import boot
from spark_host.rollout import steps
from spark_host.rollout.rollout import plan_rollback, rollout_lock
from spark_host.system import docker
from stub_host import fail_without_space

from tests.receipts import source_receipt


@pytest.fixture
def checkpoints(machine):
    return add_generations(machine)


def test_prune_removes_only_unneeded_files(machine, checkpoints):
    plan = machine.plan()
    assert names(plan, "release") == [A, B]
    assert names(plan, "tree") == [f"model-{'a' * 12}", f"model-{'b' * 12}"]
    assert names(plan, "source") == ["org--old-aaaaaaaaaaaa"]
    assert plan.kept == {C: "rollback target", D: "serving"}

    assert machine.prune().problems == ()
    assert [letter for letter, path in checkpoints.items() if path.is_dir()] == ["c", "d"]
    assert boot.read_known_good("main", machine.host.here).previous == (C,)
    assert machine.plan().items == ()


def test_prune_works_on_a_full_disk(machine, checkpoints, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(files, "write_text", fail_without_space)
        assert machine.prune().problems == ()
    assert not checkpoints["a"].exists()
    assert not checkpoints["b"].exists()
    # The good record still names removed releases; the next prune corrects it.
    assert plan_rollback("main", None, steps.this_host(machine.paths)).from_release.name == D
    assert machine.plan().items == ()
    assert machine.plan().kept == {C: "rollback target", D: "serving"}


@pytest.mark.usefixtures("checkpoints")
def test_prune_reports_the_bytes_that_it_frees(machine):
    reported, before = machine.plan().bytes, machine.used_bytes()
    machine.prune()
    directories = 3 * 4096
    assert 0 <= (before - machine.used_bytes()) - reported <= directories
    assert reported > 3 * 64 * 1024


def test_prune_counts_no_bytes_for_hard_linked_files(machine, checkpoints):
    os.link(checkpoints["a"] / "weights", machine.paths.root / "users-own")
    sizes = {Path(item.name).name: item.bytes for item in machine.plan().items}
    assert sizes[f"model-{'a' * 12}"] <= 8192 < sizes[f"model-{'b' * 12}"]


@pytest.mark.usefixtures("checkpoints")
def test_prune_removes_a_damaged_rollback_target(machine):
    assert C in machine.plan(1).kept
    machine.paths.release(C).write_bytes(b"")
    assert names(machine.prune(1), "release") == [A, C]
    assert not machine.paths.release(C).exists()
    assert machine.plan(1).kept == {D: "serving", B: "rollback target"}


def test_prune_keeps_planned_releases_and_files(machine, checkpoints):
    machine.image("spark-vllm:ready", "l9", size=50)
    folders = [machine.on_host(checkpoints["a"])]
    plan = machine.plan(0, releases=[B], folders=folders, images=["spark-vllm:ready"])
    assert names(plan, "release") == [A, C]
    assert names(plan, "tree") == [f"model-{'c' * 12}"]
    assert names(plan, "source") == []
    assert names(plan, "image") == []


@pytest.mark.usefixtures("checkpoints")
def test_prune_keeps_serving_and_stopped_releases(machine):
    files.remove(machine.paths.known_good("main"))
    machine.units.clear()
    machine.units[f"spark-serve@{A}.service"] = {"ActiveState": "active"}
    assert machine.plan(0).kept == {A: "serving"}
    machine.units.clear()
    stopped = {"schema_version": 1, "release": B, "at": "then"}
    write_json(machine.paths.stopped("main"), stopped)
    assert machine.plan(0).kept == {B: "stopped on purpose"}


@pytest.mark.usefixtures("checkpoints")
def test_prune_keeps_unmanaged_files(machine):
    unmanaged = [
        machine.folder("models", "my-finetune"),
        machine.folder("models", "looks-like-ours-0123456789ab"),
        machine.folder("models", "other-tool-0123456789ab", receipt='{"kind": "invoice"}'),
        machine.folder("sources", "downloads"),
        machine.folder("cache", "pip"),
    ]
    link = machine.paths.root / "srv/models/linked-0123456789ab"
    link.symlink_to(unmanaged[0])
    loop = machine.paths.root / "srv/models/loop"
    loop.symlink_to(loop)
    machine.image("ollama/ollama:latest", "x", size=9, label=None)
    machine.image(BASE, "l1", size=100, label=None)

    plan = machine.plan(0)
    machine.prune(0)

    assert all((path / "weights").is_file() for path in unmanaged)
    assert link.is_symlink()
    assert loop.is_symlink()
    assert machine.removed == []
    assert {Path(path).name for path in plan.unmanaged} >= {path.name for path in unmanaged}


def test_removes_a_cache_with_its_last_release(machine):
    checkpoint = machine.checkpoint("model-111111111111")
    cache = machine.folder("cache", "0123456789ab-mtp2")
    other = machine.folder("cache", "ba9876543210-mtp0")
    machine.good_release(A, checkpoint, cache=machine.on_host(other))
    machine.good_release(B, checkpoint, cache=machine.on_host(cache))
    machine.image("spark-vllm:one", "l1", size=1)
    for folder, letters in ((cache, "bcd"), (other, "a")):
        for letter in letters:
            (folder / f"main-{letter * 12}/nv").mkdir(parents=True)
    (cache / f".{B}.17.pruned").mkdir()
    unused = [f".{B}.17.pruned", C, D, "weights"]
    assert sorted(names(machine.plan(0), "cache")) == sorted([other.name, *unused])
    assert sorted(names(machine.plan(1), "cache")) == sorted([*unused, "weights"])
    assert machine.prune(1).problems == ()
    assert [path.name for path in cache.iterdir()] == [B]
    assert (other / A / "nv").is_dir()


def test_prune_aborts_if_state_is_unreadable_or_a_rollout_is_running(machine, checkpoints):
    for request_text in ("{}", "[]", "nonsense", '{"releases_kept": "many"}'):
        with pytest.raises(DocumentError):
            prune.main([request_text], machine.paths)
    with rollout_lock("main", machine.host.here), pytest.raises(HostToolError, match="another"):
        machine.prune()
    (machine.paths.releases / D / "release.json").write_text("{")
    with pytest.raises(HostToolError, match="malformed"):
        machine.prune()
    assert all(path.is_dir() for path in checkpoints.values())


def test_prune_removes_old_host_tools_unless_linked_or_running(machine):
    tools = machine.paths.tools
    old, current, running, site, unmanaged, old_site = folders = [
        tools / name
        for name in (
            *("1" * 12, "2" * 12, "3" * 12, f"site-{'4' * 12}", "site-mine", f"site-{'5' * 12}"),
        )
    ]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(100_000))
    (tools / "current").symlink_to(current)
    (tools / "site").symlink_to(site)
    environment = {**os.environ, "PYTHONPATH": f"{running}:{site}"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        plan = machine.plan()
        machine.prune()
        process.kill()
    sizes = {item.name: item.bytes for item in plan.items if item.kind == "tools"}
    assert set(sizes) == {str(old), str(old_site)}
    assert sizes[str(old)] >= 100_000
    assert [f for f in folders if f.exists()] == [current, running, site, unmanaged]


@pytest.mark.usefixtures("checkpoints")
def test_removed_image_frees_only_unshared_layers(machine):
    machine.image("spark-vllm:two", "b1", "b2", "p2", size=130)
    machine.image(BASE, "b1", "b2", size=100, label=None)
    proof = {"image": "spark-vllm:two", "label": "f" * 64}
    machine.job("0" * 12, proof, kind="image-build", base=BASE)
    sizes = {item.name: item.bytes for item in machine.plan().items if item.kind == "image"}
    assert sizes == {BASE: 100, "spark-vllm:two": 30}
    machine.prune()
    assert machine.removed == ["spark-vllm:two", BASE]
    assert not machine.paths.job("0" * 12).exists()


@pytest.mark.usefixtures("checkpoints")
def test_prune_keeps_the_base_of_a_kept_image(machine):
    machine.image(BASE, "l1", size=100, label=None)
    proof = {"image": "spark-vllm:one", "label": "f" * 64}
    machine.job("0" * 12, proof, kind="image-build", base=BASE)
    assert names(machine.plan(), "image") == []


@pytest.mark.usefixtures("checkpoints")
def test_removes_only_untagged_images_that_our_job_pulled(machine):
    status = machine.paths.job("0" * 12) / "status.json"
    machine.image(BASE, "l1", size=100, label=None)
    machine.job("0" * 12, {"image": BASE}, kind="image-pull")
    assert names(machine.plan(), "image") == [Path(BASE).name]

    write_json(status, RUN)
    assert names(machine.plan(), "image") == []

    write_json(status, {**RUN, "started_at": "then"})
    machine.images[BASE]["RepoTags"] = ["vllm/vllm:mine"]
    assert names(machine.plan(), "image") == []


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize("name", [".model-{}.partial", "model-{}.damaged", ".model-{}.pruned"])
def test_prune_removes_unfinished_folders(machine, name):
    unfinished = machine.folder("models", name.format("9" * 12))
    assert unfinished.name in names(machine.plan(), "tree")
    machine.prune()
    assert not unfinished.exists()


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("models", name) for name in ("model-{}", ".model-{}.partial", "model-{}.damaged")),
        *(("../usr/local/lib/spark", name) for name in ("{}", "{}.new", ".new-x{}")),
    ],
)
def test_next_prune_finishes_an_interrupted_removal(machine, monkeypatch, kind, name):
    folder = machine.folder(kind, name.format("9" * 12), receipt=source_receipt())
    before = set(folder.parent.iterdir()) - {folder}
    with monkeypatch.context() as interruption:
        interruption.setattr(files, "sync_directory", fail_without_space)
        with pytest.raises(OSError, match="space"):
            resources.remove_folder(folder)
    (left,) = set(folder.parent.iterdir()) - before
    machine.prune()
    assert not left.exists()


@pytest.mark.usefixtures("checkpoints")
@pytest.mark.parametrize("running", [True, False], ids=["running", "continues at next boot"])
def test_prune_keeps_results_of_unfinished_jobs(machine, running):
    growing = machine.folder("models", f".model-{'9' * 12}.partial")
    source = machine.source("org--third-cccccccccccc")
    checkpoint = machine.paths.root / "srv/models" / f"model-{'9' * 12}"
    first, second = "1" * 12, "2" * 12
    for digest12, folder, after in ((first, source, []), (second, checkpoint, [first])):
        proof = {"receipt": f"{machine.on_host(folder)}/receipt.json", "digest": ""}
        machine.job(digest12, proof, after=after)
    if running:
        machine.units[f"spark-job@{second}.service"] = {"ActiveState": "activating"}
    else:
        wants = machine.paths.units / "multi-user.target.wants"
        wants.mkdir(parents=True)
        (wants / "spark-prepare@main-ready.target").symlink_to("/nowhere")
        drop_in = machine.paths.units / "spark-prepare@main-ready.target.d" / f"{second}.conf"
        drop_in.parent.mkdir()
        drop_in.touch()

    machine.prune()

    assert growing.is_dir()
    assert source.is_dir()
    assert machine.paths.job(second).is_dir()


def test_reports_image_that_cannot_be_removed_and_removes_the_rest(
    machine, checkpoints, monkeypatch
):
    machine.image("spark-vllm:two", "p2", size=130)
    failure = subprocess.CompletedProcess((), 1, "", "conflict: image is being used")
    monkeypatch.setattr(docker, "client", lambda *words, **_: failure)
    assert "being used" in machine.prune().problems[0]
    assert not checkpoints["a"].exists()
