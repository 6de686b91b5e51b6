"""A chat model, an embedder and a ranker on one host, each by the real engine, under one address.

The repositories are written by transformers; the engines are the CPU build, one for each.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.labkit import SPARE, Guest, Site, guest_named
from tests.published import START_S, added, chat, embedded, ranked, site_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

NAME = SPARE[0]
CHAT, EMBEDDER, RANKER = "tiny-qwen3", "tiny-embedder", "tiny-reranker"
SERVICES = {
    "embed": {"model": EMBEDDER, "profile": "lab-plain", "port": 8001, "memory_gib": 5,
              "names": ["embedder"]},
    "rerank": {"model": RANKER, "profile": "lab-plain", "port": 8002, "memory_gib": 5,
               "names": ["ranker"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = site_of(tmp_path_factory.mktemp("three"), NAME)
    for model in (CHAT, EMBEDDER, RANKER):
        added(made, f"org/{model}")
    made.choose(model=CHAT, profile="lab-plain", services=SERVICES, memory={"total_gib": 20})
    return made


@pytest.fixture(scope="module")
def guest(site: Site) -> Guest:
    run = site.deploy(timeout_s=4 * START_S)
    assert run.exit_code == 0, run.stderr[-6000:]
    return guest_named(NAME)


def test_all_three_are_proven_and_a_second_run_changes_nothing(site: Site, guest: Guest) -> None:
    assert len(guest.serving()) == 3
    for unit in guest.serving():
        name = unit.split("@")[1].removesuffix(".service")
        proof: dict[str, Any] = guest.json(f"cat /var/lib/spark/proofs/{name}.json")
        assert proof["ok"], proof
    site.deploy().must_have_changed_nothing()


def test_one_address_answers_for_all_three(guest: Guest) -> None:
    status, listed = guest.call("GET", "/v1/models")
    names = {one["id"] for one in listed["data"]}
    assert (status, names) == (200, {guest.names()[0], "embedder", "ranker"})
    assert chat(guest) == (200, "Paris")
    assert embedded(guest, "embedder") == (200, [128, 128])
    assert ranked(guest, "ranker") == (200, [1, 0])


def test_one_that_is_stopped_leaves_the_others_alone(site: Site, guest: Guest) -> None:
    assert site.look("stop", "--service", "embed").returncode == 0
    assert embedded(guest, "embedder")[0] == 503
    assert (chat(guest), ranked(guest, "ranker")) == ((200, "Paris"), (200, [1, 0]))
    assert site.look("start", timeout_s=START_S).returncode == 0
    assert embedded(guest, "embedder") == (200, [128, 128])


def test_after_a_reboot_all_three_serve(site: Site, guest: Guest) -> None:
    guest.reboot()
    up = "test $(systemctl is-active 'spark-serve@*' | grep -cx active) = 3"
    guest.wait(up, seconds=START_S)
    assert chat(guest) == (200, "Paris")
    assert (embedded(guest, "embedder")[0], ranked(guest, "ranker")[0]) == (200, 200)
    site.deploy(timeout_s=START_S).must_have_changed_nothing()


def test_memory_that_three_cannot_share_is_refused_with_the_number_that_fits(site: Site) -> None:
    asked = {name: {**one, "memory_gib": 500} for name, one in SERVICES.items()}
    site.choose(services=asked)
    done = site.look("plan")
    site.choose(services=SERVICES)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "lower services.embed.memory_gib, services.rerank.memory_gib to " in said
