"""One host fetches, the others take from it: who asks whom."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from spark_contract.documents import parse
from spark_contract.fetching import CopyPlan, FetchPlan, FinishedTree, LayersPlan, Peers

from spark_deploy.plan.jobs import (
    Member,
    State,
    Work,
    jobs_of,
    peers_of,
    shared_trees,
    trees_to_share,
    with_peers,
)
from tests.unit.planning.plans import plan_of

TREE = "f" * 64


def members(states: str) -> list[Member]:
    """Return hosts a, b, ... of which each has the tree (+), is at it (~) or lacks it (-)."""
    said: dict[str, State] = {"+": "there", "~": "under way", "-": "missing"}
    return [
        Member(name, name, {TREE: said[s]}) for name, s in zip("abcdefgh", states, strict=False)
    ]


@pytest.mark.parametrize(
    ("states", "asked"),
    [
        ("----", {"a": "", "b": "a", "c": "ba", "d": "cba"}),
        ("-+--", {"a": "b", "c": "ba", "d": "bca"}),
        ("++--", {"c": "ab", "d": "bac"}),
        ("-~-", {"a": "b", "c": "ba"}),
        ("+~-", {"c": "ab"}),
        ("-", {"a": ""}),
    ],
)
def test_those_who_have_a_tree_are_asked_before_those_who_are_at_it(
    states: str, asked: dict[str, str]
) -> None:
    hosts = members(states)
    assert {name: "".join(peers_of(name, TREE, hosts)) for name in asked} == asked


@pytest.mark.parametrize("states", ["----", "-+--", "-----", "+-------", "~--"])
def test_no_host_that_begins_waits_for_one_that_waits_for_it(states: str) -> None:
    hosts = members(states)
    waits = {
        one.name: {
            url for url in peers_of(one.name, TREE, hosts)
            if next(other for other in hosts if other.name == url).trees[TREE] == "missing"
        }
        for one in hosts
        if one.trees[TREE] == "missing"
    }  # fmt: skip
    done: set[str] = set()
    while len(done) < len(waits):
        free = {name for name, on in waits.items() if name not in done and on <= done}
        assert free
        done |= free
    assert sum(not peers_of(name, TREE, hosts) for name in waits) <= 1


@pytest.mark.parametrize("those_there", [0, 1, 3])
def test_among_a_hundred_hosts_nobody_sends_more_than_a_few_copies(those_there: int) -> None:
    said: list[State] = ["there"] * those_there + ["missing"] * (100 - those_there)
    hosts = [Member(f"h{n}", f"h{n}", {TREE: state}) for n, state in enumerate(said)]
    asked = {one.name: peers_of(one.name, TREE, hosts) for one in hosts[those_there:]}
    first = Counter(urls[0] for urls in asked.values() if urls)
    assert max(first.values()) <= 8
    assert sum(not urls for urls in asked.values()) == (0 if those_there else 1)


def test_those_who_have_a_tree_are_asked_by_turns() -> None:
    first = {peers_of(name, TREE, members("+++---"))[0] for name in "def"}
    assert first == {"a", "b", "c"}


def test_a_tree_is_lent_only_while_another_host_lacks_it() -> None:
    assert trees_to_share("a", members("++")) == frozenset()
    assert trees_to_share("a", members("+-")) == {TREE}
    assert trees_to_share("b", members("+-")) == frozenset()
    other = Member("b", "b", {"e" * 64: "missing"})
    assert trees_to_share("a", [*members("+"), other]) == frozenset()


WORKS = jobs_of(plan_of("large", "v2"), ())
FETCH, BUILD, IMAGE = WORKS


def pair(state: State, receipts: dict[str, str]) -> list[Member]:
    """Return a peer whose trees are all in one state, and a host that has none."""
    trees = {one.digest: state for one in shared_trees(WORKS)}
    return [
        Member("peer", "http://peer:1", trees, receipts),
        Member("me", "", dict.fromkeys(trees, "missing")),
    ]


def digest_of_tree(work: Work) -> str:
    [tree] = shared_trees([work])
    return tree.digest


def test_an_order_to_fetch_names_peers_and_nothing_else_of_it_changes() -> None:
    told = with_peers(FETCH, "me", pair("under way", {}))
    [file] = told.inputs
    assert told.job == FETCH.job
    assert parse(FetchPlan, file.content.decode()).peers == Peers(("http://peer:1",))
    plain, named = json.loads(FETCH.inputs[0].content), json.loads(file.content)
    assert named.pop("peers") == {"urls": ["http://peer:1"]}
    assert plain == named


def test_a_tree_is_copied_from_a_peer_only_with_the_hash_of_its_receipt() -> None:
    digest = digest_of_tree(BUILD)
    told = with_peers(BUILD, "me", pair("there", {digest: "a" * 64}))
    plan, copy = told.inputs
    assert plan == BUILD.inputs[0]
    assert told.job.digest == BUILD.job.digest
    assert told.job.argv == (*BUILD.job.argv, "--or-copy", copy.path)
    order = parse(CopyPlan, copy.content.decode())
    assert order == CopyPlan(digest, (FinishedTree("http://peer:1", "a" * 64),))
    assert with_peers(BUILD, "me", pair("there", {})) is BUILD


def test_work_that_no_peer_has_done_stays_as_it_is() -> None:
    alone = pair("there", {})[1:]
    assert all(with_peers(work, "me", alone) is work for work in WORKS)
    assert with_peers(BUILD, "me", pair("missing", {})) is BUILD


def test_of_what_is_built_only_whole_trees_are_lent() -> None:
    assert [tree.unfinished for tree in shared_trees(WORKS)] == [True, False, True]
    names = [work.job.digest12 for work in WORKS]
    assert [tree.job for tree in shared_trees(WORKS)] == names


def layers_of(work: Work) -> LayersPlan:
    [file] = [one for one in work.inputs if one.path.endswith("/layers.json")]
    tool, *words = IMAGE.job.argv
    assert work.job.argv == (tool, words[0], "--layers", file.path, *words[1:])
    assert work.job.digest == IMAGE.job.digest
    return parse(LayersPlan, file.content.decode())


def images(states: str) -> list[Member]:
    """Return hosts of which each has the blobs (+), lacks the image (-), or needs no blobs (=)."""
    said: dict[str, State] = {"+": "there", "-": "missing", "=": "needless"}
    digest = digest_of_tree(IMAGE)
    return [Member(name, name, {digest: said[s]}) for name, s in zip("abcd", states, strict=False)]


@pytest.mark.parametrize(
    ("states", "asks", "keeps"),
    [("---", {"a": (), "b": ("a",), "c": ("b", "a")}, "a"), ("+=-", {"c": ("a",)}, "")],
)
def test_an_image_s_blobs_cross_the_line_once_and_stay_where_they_came_first(
    states: str, asks: dict[str, tuple[str, ...]], keeps: str
) -> None:
    for name, peers in asks.items():
        order = layers_of(with_peers(IMAGE, name, images(states)))
        assert (order.peers.urls if order.peers else ()) == peers
        assert order.keep == (name in keeps)


@pytest.mark.parametrize("states", ["-", "=-"])
def test_an_image_that_no_other_host_wants_or_has_is_pulled_as_ever(states: str) -> None:
    hosts = images(states)
    assert with_peers(IMAGE, hosts[-1].name, hosts) is IMAGE
