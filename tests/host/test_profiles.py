"""Changing one variable switches the profile, and back, without building anything twice."""

from __future__ import annotations

import pytest

from tests.host.conftest import Fleet
from tests.labkit import lab


def value_of(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_a_profile_round_trip_ends_where_it_began_and_shares_one_tree(fleet: Fleet) -> None:
    fleet.settle()
    guest = fleet.guests[0]
    first, argv = guest.serving(), guest.argv()
    trees = guest.run("ls /srv/spark/models")
    built = guest.run("stat -c %Y /srv/spark/models/*/receipt.json")
    names = guest.names()

    fleet.site.choose(profile="v2-tq")
    away = fleet.site.deploy()
    there = guest.argv()
    assert away.exit_code == 0, away.stderr[-4000:]
    assert guest.serving() != first
    assert value_of(there, "--max-model-len") != value_of(argv, "--max-model-len")
    assert guest.names()[0] == names[0]
    status, body = guest.ask("What is the capital of France?")
    assert (status, "Paris" in str(body)) == (200, True)

    fleet.site.choose(profile="v2")
    back = fleet.site.deploy()
    assert back.exit_code == 0, back.stderr[-4000:]

    assert guest.serving() == first
    assert guest.boots() == first
    assert guest.argv() == argv
    assert guest.run("ls /srv/spark/models") == trees
    assert guest.run("stat -c %Y /srv/spark/models/*/receipt.json") == built
    assert fleet.site.deploy().changed == []


def test_every_alias_is_served(fleet: Fleet) -> None:
    fleet.settle(serve={"names": ["spark", "qwen", "assistant"]})
    guest = fleet.guests[0]

    assert guest.names() == ["spark", "qwen", "assistant"]
    for name in guest.names():
        assert guest.ask("What is the capital of France?", model=name)[0] == 200


@pytest.mark.engine
def test_the_real_engine_serves_the_hybrid_that_our_builder_made(fleet: Fleet) -> None:
    one = fleet.guests[0]
    lab("prepare", "--engine", "cpu")
    fleet.settle()
    fleet.site.choose(model="lab-tiny")
    run = fleet.site.deploy("--limit", one.name)
    assert run.exit_code == 0, run.stderr[-6000:]

    status, body = one.ask("What is the capital of France?")
    log = one.run(f"journalctl -u {one.serving()[0]} -o cat")
    metrics = one.run("curl -sS --unix-socket /run/spark/main/engine.sock http://engine/metrics")
    release = one.serving()[0].removeprefix("spark-serve@").removesuffix(".service")
    proof = one.json(f"cat /var/lib/spark/proofs/{release}.json")

    assert status == 200
    assert "Paris" in body["choices"][0]["message"]["content"]
    assert "spark portable mode" in log
    assert proof["portable"]
    assert "vllm:generation_tokens_total" in metrics
    assert fleet.site.deploy("--limit", one.name).changed == []
