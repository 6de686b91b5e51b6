import re
from dataclasses import dataclass

import pytest

from spark_deploy.config.catalog.load import read_catalog
from tests.labkit import lab

pytestmark = pytest.mark.gate

CATALOG = read_catalog()
DECLARED = {name: CATALOG.profile(name, "lab-tiny") for name in ("v2", "v2-tq")}


def value_of(argv, option):
    return argv[argv.index(option) + 1]


def label_of(metrics, metric, label):
    [sample] = [line for line in metrics.splitlines() if line.startswith(metric + "{")]
    match = re.search(rf'\b{label}="([^"]*)"', sample)
    assert match, sample
    return match[1]


def assert_runs_as_declared(guest, profile):
    declared, argv, metrics = DECLARED[profile], guest.argv(), guest.metrics()
    limits = declared.limits
    assert value_of(argv, "--max-model-len") == str(limits.max_context_tokens)
    assert value_of(argv, "--max-num-seqs") == str(limits.max_sequences)
    for metric, labels in declared.check.metrics_required.items():
        for label, value in labels.items():
            assert label_of(metrics, metric, label) == value


@dataclass(frozen=True)
class Served:
    units: list[str]
    boots: list[str]
    release_sha256: str
    tree: str
    inodes: str

    @classmethod
    def on(cls, guest):
        path = f"/etc/spark/releases/{guest.release()}/release.json"
        mounts = guest.container()["Mounts"]
        [tree] = [mount["Source"] for mount in mounts if mount["Destination"] == "/model"]
        return cls(
            units=guest.serving(),
            boots=guest.boots(),
            release_sha256=guest.run(f"sha256sum {path}").split()[0],
            tree=tree,
            inodes=guest.run(f"ls -i1 {tree}; stat -c '%i %Y' {tree}/receipt.json"),
        )


def test_switching_profile_and_back_reuses_the_checkpoint(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    first, argv = Served.on(guest), guest.argv()
    trees = guest.run("ls -i /srv/spark/models")
    names = guest.names()
    assert DECLARED["v2"].limits != DECLARED["v2-tq"].limits
    assert_runs_as_declared(guest, "v2")

    fleet.site.choose(profile="v2-tq")
    fleet.site.deploy().assert_succeeded()
    second = Served.on(guest)
    assert second.units != first.units
    assert second.release_sha256 != first.release_sha256
    assert (second.tree, second.inodes) == (first.tree, first.inodes)
    assert_runs_as_declared(guest, "v2-tq")
    assert guest.names()[0] == names[0]
    assert guest.answers()

    fleet.site.choose(profile="v2")
    fleet.site.deploy().assert_succeeded()

    assert Served.on(guest) == first
    assert guest.argv() == argv
    assert_runs_as_declared(guest, "v2")
    assert guest.run("ls -i /srv/spark/models") == trees
    fleet.site.deploy().assert_unchanged()


def test_server_answers_requests_for_every_alias(fleet):
    fleet.settle(serve={"names": ["spark", "qwen", "assistant"]})
    guest = fleet.guests[0]

    assert guest.names() == ["spark", "qwen", "assistant"]
    for name in guest.names():
        assert guest.ask(model=name)[0] == 200


@pytest.mark.engine
def test_real_engine_serves_built_hybrid_checkpoint(fleet):
    guest = fleet.guests[0]
    lab("prepare", "--engine", "cpu")
    fleet.settle()
    fleet.site.choose(model="lab-tiny")
    fleet.site.deploy("--limit", guest.name).assert_succeeded()

    status, body = guest.ask("What is the capital of France?")
    assert status == 200
    assert "Paris" in body["choices"][0]["message"]["content"]
    assert "spark portable mode" in guest.run(f"journalctl -u {guest.serving()[0]} -o cat")
    assert guest.proof()["portable"]
    assert "vllm:generation_tokens_total" in guest.metrics()
    fleet.site.deploy("--limit", guest.name).assert_unchanged()
