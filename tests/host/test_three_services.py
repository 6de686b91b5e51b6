import pytest

from tests.labkit import SPARE, Guest, Site, guest_named
from tests.published import START_S, add_or_fail, chat, embed, fresh_site, rerank

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
    site = fresh_site(tmp_path_factory.mktemp("three"), NAME)
    for model in (CHAT, EMBEDDER, RANKER):
        add_or_fail(site, f"org/{model}")
    site.choose(model=CHAT, profile="lab-plain", services=SERVICES, memory={"total_gib": 20})
    return site


@pytest.fixture(scope="module")
def guest(site: Site) -> Guest:
    site.deploy(timeout_s=4 * START_S).assert_succeeded()
    return guest_named(NAME)


def test_all_are_proven_and_second_run_changes_nothing(site: Site, guest: Guest) -> None:
    assert len(guest.serving()) == 3
    for unit in guest.serving():
        assert guest.proof(unit.split("@")[1].removesuffix(".service"))["ok"]
    site.deploy().assert_unchanged()


def test_one_address_serves_all(guest: Guest) -> None:
    status, listed = guest.call("GET", "/v1/models")
    names = {model["id"] for model in listed["data"]}
    assert (status, names) == (200, {guest.names()[0], "embedder", "ranker"})
    assert chat(guest) == (200, "Paris")
    assert embed(guest, "embedder") == (200, [128, 128])
    assert rerank(guest, "ranker") == (200, [1, 0])
