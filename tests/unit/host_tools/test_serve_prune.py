"""Pruning removes what nothing kept needs, says its bytes truly, and touches nothing else."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from spark_contract import files
from spark_contract.errors import HostToolError
from spark_contract.work.keep import Pruning
from spark_host.prune import prune
from spark_host.records import boot
from spark_host.rollout import ports
from spark_host.rollout.rollout import one_at_a_time
from spark_host.rollout.way_back import way_back
from spark_host.system import docker, systemd
from stub_host import Host

from tests.receipts import checkpoint_receipt, source_receipt

A, B, C, D = (f"main-{digit * 12}" for digit in "abcd")
BASE = "registry/vllm@sha256:" + "b" * 64


# As the tools wrote it before it was a document of the contract.
RUN = {"state": "done", "exit_code": 0, "started_at": None, "ended_at": "now", "last_lines": []}


def put(path: Path, data: Any) -> None:
    files.write_text(path, json.dumps(data))


class Machine:
    """A host with trees, images and releases of several generations."""

    def __init__(self, host: Host):
        self.host, self.paths = host, host.paths
        self.units: dict[str, dict[str, str]] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.removed: list[str] = []

    def folder(self, kind: str, name: str, *, kilobytes: int = 64, receipt: str = "") -> Path:
        path = self.paths.root / "srv" / kind / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights").write_bytes(os.urandom(kilobytes * 1024))
        if receipt:
            (path / "receipt.json").write_text(receipt)
        return path

    def tree(self, name: str, base: Path | None = None) -> Path:
        receipt = checkpoint_receipt(self.shown(base)) if base else checkpoint_receipt()
        path = self.folder("models", name, receipt=receipt)
        if base:
            os.link(base / "weights", path / "base-weights")
        return path

    def source(self, name: str) -> Path:
        return self.folder("sources", name, receipt=source_receipt())

    def image(self, tag: str, *layers: str, size: int, label: str | None = "f" * 64) -> None:
        pulled = "@" in tag
        self.images[tag] = {
            "RepoTags": None if pulled else [tag],
            "RepoDigests": [tag] if pulled else [],
            "Labels": {"spark.digest": label} if label else None,
            "RootFS": {"Layers": list(layers)},
            "Size": size,
        }

    def good(self, name: str, tree: Path, image: str = "spark-vllm:one", cache: str = "") -> None:
        mounts = [{"source": cache, "target": "/root/.cache", "read_only": False}] if cache else []
        release = self.host.release(
            name,
            tree={"path": self.shown(tree), "digest": "d" * 64},
            image={"tag": image, "digest_label": None},
            engine={"argv": ["/model"], "env": {}, "mounts": mounts, "docker_args": []},
        )
        boot.record_good(release, self.host.here)

    def job(self, digest12: str, proof: dict[str, str], *words: str, kind: str = "fetch") -> None:
        data = {
            "schema_version": 1, "digest": digest12.ljust(64, "0"), "kind": kind,
            "title": digest12, "argv": ["true", *words], "env": {}, "proof": proof,
            "total_bytes": None, "after": [],
        }  # fmt: skip
        put(self.paths.job(digest12) / "job.json", data)
        files.write_text(
            self.paths.job(digest12) / "status.json", json.dumps({**RUN, "started_at": "then"})
        )

    def shown(self, path: Path) -> str:
        """Return a path as release and plan write it, without the root of this test."""
        return "/" + str(path.relative_to(self.paths.root))

    def keep(self, kept: int = 1, **more: Any) -> str:
        wishes = {
            "releases_kept": kept, "releases": [], "folders": [], "images": [],
            "models_dir": "/srv/models", "sources_dir": "/srv/sources", "cache_dir": "/srv/cache",
        }  # fmt: skip
        return json.dumps({**wishes, **more})

    def look(self, kept: int = 1, **more: Any) -> Pruning:
        return prune.look(prune.read_keep(self.keep(kept, **more)), self.paths).document()

    def prune(self, kept: int = 1, **more: Any) -> int:
        return prune.main([self.keep(kept, **more)], self.paths)

    def used_bytes(self) -> int:
        said = subprocess.run(
            ["du", "-s", "-B1", str(self.paths.root / "srv")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(said.stdout.split()[0])


@pytest.fixture
def machine(host: Host, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(host)

    def ask(path: str, timeout_s: float = 10) -> Any:
        if path == "/images/json":
            return list(made.images.values())
        return []

    def client(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        assert words[0] == "rmi"
        made.removed.append(words[1])
        made.images.pop(words[1])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(docker, "ask", ask)
    monkeypatch.setattr(docker, "is_up", lambda: True)
    monkeypatch.setattr(docker, "image", lambda tag: made.images.get(tag))
    monkeypatch.setattr(docker, "client", client)
    monkeypatch.setattr(systemd, "show", lambda units, fields: made.units)
    monkeypatch.setattr(
        systemd, "systemctl", lambda *words, **_: subprocess.CompletedProcess(words, 0, "", "")
    )
    return made


def names(found: Pruning, kind: str) -> list[str]:
    return [Path(item.name).name for item in found.items if item.kind == kind]


def generations(machine: Machine) -> dict[str, Path]:
    """Have four releases with a tree each, from two sources; D serves."""
    old, new = machine.source("org--old-aaaaaaaaaaaa"), machine.source("org--new-bbbbbbbbbbbb")
    trees = {}
    for letter, base in zip("abcd", (old, old, new, new), strict=True):
        trees[letter] = machine.tree(f"model-{letter * 12}", base)
        machine.good(f"main-{letter * 12}", trees[letter])
    machine.image("spark-vllm:one", "l1", "l2", size=300)
    machine.units[f"spark-serve@{D}.service"] = {"ActiveState": "active"}
    return trees


def test_what_no_kept_release_needs_goes_and_the_rest_serves_on(machine: Machine) -> None:
    trees = generations(machine)
    found = machine.look(kept=1)

    assert names(found, "release") == [A, B]
    assert names(found, "tree") == [f"model-{'a' * 12}", f"model-{'b' * 12}"]
    assert names(found, "source") == ["org--old-aaaaaaaaaaaa"]
    assert found.kept == {C: "a way back", D: "serves"}

    assert machine.prune(kept=1) == 0
    assert not trees["a"].exists()
    assert trees["c"].is_dir()
    assert trees["d"].is_dir()
    assert boot.good("main", machine.host.here).previous == (C,)


def test_a_disk_too_full_for_any_record_is_freed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = generations(machine)

    def write(path: Path, text: str, mode: int = 0o644) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr(files, "write_text", write)
        assert machine.prune(kept=1) == 0
    assert not trees["a"].exists()
    assert not trees["b"].exists()
    # What the record could not say harms nobody, and is said when there is room.
    assert way_back("main", None, ports.this_host(machine.paths)).came.name == D
    assert machine.look(kept=1).items == ()
    assert machine.look(kept=1).kept == {C: "a way back", D: "serves"}


def test_the_bytes_are_those_that_the_disk_gives_back(machine: Machine) -> None:
    generations(machine)
    promised, before = machine.look(kept=1).bytes, machine.used_bytes()
    machine.prune(kept=1)
    directories = 3 * 4096
    assert 0 <= (before - machine.used_bytes()) - promised <= directories
    assert promised > 3 * 64 * 1024


def test_a_file_that_others_link_gives_back_nothing(machine: Machine) -> None:
    trees = generations(machine)
    hub = machine.paths.root / "home"
    hub.mkdir()
    os.link(trees["a"] / "weights", hub / "users-own")
    found = machine.look(kept=1)
    by_name = {Path(item.name).name: item.bytes for item in found.items}
    # Beside the linked weights only the receipt is left.
    assert by_name[f"model-{'a' * 12}"] <= 8192 < by_name[f"model-{'b' * 12}"]


def test_a_second_run_finds_nothing(machine: Machine) -> None:
    generations(machine)
    machine.prune()
    assert machine.look().items == ()


def test_dry_touches_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    generations(machine)
    before = sorted(machine.paths.root.rglob("*"))
    assert prune.main(["--dry", machine.keep()], machine.paths) == 0
    assert json.loads(capsys.readouterr().out)["items"]
    assert sorted(machine.paths.root.rglob("*")) == before


def test_what_the_plan_uses_and_keeps_ready_stays(machine: Machine) -> None:
    trees = generations(machine)
    machine.image("spark-vllm:ready", "l9", size=50)
    kept = machine.look(
        kept=0, releases=[B], folders=[machine.shown(trees["a"])], images=["spark-vllm:ready"]
    )
    assert names(kept, "release") == [A, C]
    assert names(kept, "tree") == [f"model-{'c' * 12}"]
    assert names(kept, "source") == []  # both are the base of a tree that stays
    assert names(kept, "image") == []


def test_the_release_that_serves_stays_whatever_the_records_say(machine: Machine) -> None:
    generations(machine)
    files.remove(machine.paths.good("main"))
    machine.units[f"spark-serve@{A}.service"] = {"ActiveState": "active"}
    del machine.units[f"spark-serve@{D}.service"]
    assert machine.look(kept=0).kept == {A: "serves"}


def test_a_stopped_release_stays(machine: Machine) -> None:
    generations(machine)
    machine.units.clear()
    files.remove(machine.paths.good("main"))
    put(machine.paths.stopped("main"), {"release": B, "at": "then"})
    assert machine.look(kept=0).kept == {B: "stopped on purpose"}


def test_what_we_did_not_make_is_never_touched(machine: Machine) -> None:
    generations(machine)
    strangers = [
        machine.folder("models", "my-finetune"),
        machine.folder("models", "looks-like-ours-0123456789ab"),
        machine.folder("models", "other-tool-0123456789ab", receipt='{"kind": "invoice"}'),
        machine.folder("sources", "downloads"),
        machine.folder("cache", "pip"),
    ]
    link = machine.paths.root / "srv/models/linked-0123456789ab"
    link.symlink_to(strangers[0])
    machine.image("ollama/ollama:latest", "x", size=9, label=None)
    machine.image(BASE, "l1", size=100, label=None)  # pulled, but by no job of ours

    found = machine.look(kept=0)
    machine.prune(kept=0)

    assert all((path / "weights").is_file() for path in strangers)
    assert link.is_symlink()
    assert machine.removed == []
    assert {Path(path).name for path in found.not_ours} >= {path.name for path in strangers}


def test_images_go_with_their_base_and_only_their_own_layers_count(machine: Machine) -> None:
    generations(machine)
    machine.image("spark-vllm:two", "b1", "b2", "p2", size=130)
    machine.image(BASE, "b1", "b2", size=100, label=None)
    proof = {"image": "spark-vllm:two", "label": "f" * 64}
    machine.job("0" * 12, proof, f"BASE={BASE}", kind="image-build")

    found = machine.look()

    assert names(found, "image") == [Path(BASE).name, "spark-vllm:two"]
    sizes = {item.name: item.bytes for item in found.items if item.kind == "image"}
    assert sizes == {BASE: 100, "spark-vllm:two": 30}
    machine.prune()
    assert machine.removed == ["spark-vllm:two", BASE]  # the one on top first
    assert not machine.paths.job("0" * 12).exists()


def test_the_base_of_an_image_that_stays_stays(machine: Machine) -> None:
    generations(machine)
    machine.image(BASE, "l1", size=100, label=None)
    proof = {"image": "spark-vllm:one", "label": "f" * 64}
    machine.job("0" * 12, proof, f"BASE={BASE}", kind="image-build")
    assert names(machine.look(), "image") == []


def test_a_pulled_image_goes_only_when_our_job_pulled_it_and_nobody_named_it(
    machine: Machine,
) -> None:
    generations(machine)
    machine.image(BASE, "l1", size=100, label=None)
    machine.job("0" * 12, {"image": BASE}, kind="image-pull")
    assert names(machine.look(), "image") == [Path(BASE).name]

    put(machine.paths.job("0" * 12) / "status.json", RUN)
    assert names(machine.look(), "image") == []  # it was there before our job

    files.write_text(
        machine.paths.job("0" * 12) / "status.json", json.dumps({**RUN, "started_at": "then"})
    )
    machine.images[BASE]["RepoTags"] = ["vllm/vllm:mine"]
    assert names(machine.look(), "image") == []


@pytest.mark.parametrize("name", [".model-{}.partial", "model-{}.damaged", ".model-{}.pruned"])
def test_what_unfinished_work_left_goes_too(machine: Machine, name: str) -> None:
    generations(machine)
    left = machine.folder("models", name.format("9" * 12))
    assert names(machine.look(), "tree") == [
        *sorted([left.name, f"model-{'a' * 12}", f"model-{'b' * 12}"])
    ]
    machine.prune()
    assert not left.exists()


@pytest.mark.parametrize("how", ["runs", "goes on at the next boot"])
def test_work_under_way_keeps_what_it_makes(machine: Machine, how: str) -> None:
    generations(machine)
    growing = machine.folder("models", f".model-{'9' * 12}.partial")
    source = machine.source("org--third-cccccccccccc")
    tree = machine.paths.root / "srv/models" / f"model-{'9' * 12}"
    machine.job("1" * 12, {"receipt": machine.shown(source) + "/receipt.json", "digest": ""})
    machine.job("2" * 12, {"receipt": machine.shown(tree) + "/receipt.json", "digest": ""})
    data = json.loads((machine.paths.job("2" * 12) / "job.json").read_text())
    files.write_text(
        machine.paths.job("2" * 12) / "job.json", json.dumps({**data, "after": ["1" * 12]})
    )
    if how == "runs":
        machine.units[f"spark-job@{'2' * 12}.service"] = {"ActiveState": "activating"}
    else:
        wants = machine.paths.units / "multi-user.target.wants"
        wants.mkdir(parents=True)
        (wants / "spark-prepare@main-ready.target").symlink_to("/nowhere")
        conf = machine.paths.units / "spark-prepare@main-ready.target.d" / f"{'2' * 12}.conf"
        conf.parent.mkdir()
        conf.write_text("")

    machine.prune()

    assert growing.is_dir()
    assert source.is_dir()
    assert machine.paths.job("2" * 12).is_dir()


def test_caches_go_with_the_last_release_that_mounts_them(machine: Machine) -> None:
    tree = machine.tree("model-111111111111")
    ours = machine.folder("cache", "0123456789ab-mtp2")
    other = machine.folder("cache", "ba9876543210-mtp0")
    machine.good(A, tree, cache=machine.shown(other))
    machine.good(B, tree, cache=machine.shown(ours))
    machine.image("spark-vllm:one", "l1", size=1)
    assert names(machine.look(kept=0), "cache") == [other.name]
    assert names(machine.look(kept=1), "cache") == []


def test_a_kept_release_that_cannot_be_read_stops_everything(machine: Machine) -> None:
    trees = generations(machine)
    (machine.paths.releases / D / "release.json").write_text("{")
    with pytest.raises(HostToolError, match="malformed"):
        machine.prune()
    assert all(tree.is_dir() for tree in trees.values())


def test_a_change_under_way_stops_everything(machine: Machine) -> None:
    trees = generations(machine)
    with (
        one_at_a_time("main", machine.host.here),
        pytest.raises(HostToolError, match="another change is under way"),
    ):
        machine.prune()
    assert all(tree.is_dir() for tree in trees.values())


@pytest.mark.parametrize("wishes", ["{}", "[]", "nonsense", '{"releases_kept": "many"}'])
def test_wishes_that_cannot_be_read_keep_everything(machine: Machine, wishes: str) -> None:
    trees = generations(machine)
    with pytest.raises(HostToolError, match="what to keep"):
        prune.main([wishes], machine.paths)
    assert all(tree.is_dir() for tree in trees.values())


def test_an_image_that_docker_will_not_give_up_is_said_and_the_rest_goes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = generations(machine)
    machine.image("spark-vllm:two", "p2", size=130)
    refused = subprocess.CompletedProcess((), 1, "", "conflict: image is being used")
    monkeypatch.setattr(docker, "client", lambda *words, **_: refused)
    assert machine.prune() == 1
    assert "being used" in json.loads(capsys.readouterr().out)["problems"][0]
    assert not trees["a"].exists()


def test_old_host_tools_go_unless_something_leads_to_them_or_runs_them(machine: Machine) -> None:
    tools = machine.paths.tools
    old, now, run, site, packages = (
        tools / name for name in ("1" * 12, "2" * 12, "3" * 12, f"site-{'4' * 12}", "site-mine")
    )
    for folder in (old, now, run, site, packages, tools / f"site-{'5' * 12}"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(100_000))
    (tools / "current").symlink_to(now)
    (tools / "site").symlink_to(site)
    with subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "PYTHONPATH": f"{run}:{site}"}
    ) as process:
        going = prune.look(prune.read_keep(machine.keep()), machine.paths)
        names = {folder.path.name for folder in going.folders if folder.kind == "tools"}
        process.kill()
    assert names == {"1" * 12, f"site-{'5' * 12}"}
    assert going.bytes[str(old)] >= 100_000
    prune.remove(going, machine.paths)
    assert not old.exists()
    assert now.is_dir()
    assert run.is_dir()
    assert packages.is_dir()
