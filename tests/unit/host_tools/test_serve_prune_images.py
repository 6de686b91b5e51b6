"""Prune of images and unfinished folders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from prune_machine import BASE, RUN, Machine, generations, names, put
from spark_contract import files
from spark_host.system import docker


def test_image_frees_only_its_own_layers(machine: Machine) -> None:
    generations(machine)
    machine.image("spark-vllm:two", "b1", "b2", "p2", size=130)
    machine.image(BASE, "b1", "b2", size=100, label=None)
    proof = {"image": "spark-vllm:two", "label": "f" * 64}
    machine.job("0" * 12, proof, kind="image-build", base=BASE)

    found = machine.look()

    assert names(found, "image") == [Path(BASE).name, "spark-vllm:two"]
    sizes = {item.name: item.bytes for item in found.items if item.kind == "image"}
    assert sizes == {BASE: 100, "spark-vllm:two": 30}
    machine.prune()
    assert machine.removed == ["spark-vllm:two", BASE]  # the top image first
    assert not machine.paths.job("0" * 12).exists()


def test_base_of_a_kept_image_is_kept(machine: Machine) -> None:
    generations(machine)
    machine.image(BASE, "l1", size=100, label=None)
    proof = {"image": "spark-vllm:one", "label": "f" * 64}
    machine.job("0" * 12, proof, kind="image-build", base=BASE)
    assert names(machine.look(), "image") == []


def test_pulled_image_needs_our_job_and_no_tag(
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
def test_unfinished_folders_are_removed(machine: Machine, name: str) -> None:
    generations(machine)
    left = machine.folder("models", name.format("9" * 12))
    assert names(machine.look(), "tree") == [
        *sorted([left.name, f"model-{'a' * 12}", f"model-{'b' * 12}"])
    ]
    machine.prune()
    assert not left.exists()


@pytest.mark.parametrize("how", ["runs", "goes on at the next boot"])
def test_results_of_running_jobs_are_kept(machine: Machine, how: str) -> None:
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


def test_image_failure_is_reported_and_the_rest_removed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = generations(machine)
    machine.image("spark-vllm:two", "p2", size=130)
    refused = subprocess.CompletedProcess((), 1, "", "conflict: image is being used")
    monkeypatch.setattr(docker, "client", lambda *words, **_: refused)
    assert "being used" in machine.prune().problems[0]
    assert not trees["a"].exists()
