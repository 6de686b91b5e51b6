import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from spark_contract import documents
from spark_contract.builder_api import BuildPlan, expand_all
from spark_contract.fetching import CopyPlan, FetchPlan, FinishedTree, LayersPlan, Peers

from spark_deploy.config.settings.host import DOCKER_DIR
from spark_deploy.config.settings.sources import DownloadSettings, HubSettings
from spark_deploy.lock.resolve import required_names
from spark_deploy.lock.types import LockedSource, SourceFile
from spark_deploy.plan.jobs import fetch_job, image_job, keep_list, plan_jobs, ready_jobs
from spark_deploy.plan.peers import (
    Member,
    State,
    peer_urls,
    shared_trees,
    trees_to_share,
    with_peers,
)
from spark_deploy.plan.types import ImagePlan, ManagedFile, SourcePlan
from tests.unit.planning.plans import CATALOG, plan_of, problems, settings_of

FILES = (SourceFile("a.safetensors", 10, sha256="b" * 64), SourceFile("c", 1, git_sha1="d" * 40))
LOCKED = LockedSource("org/name", "main", "a" * 40, FILES)
HUB = HubSettings("http://hub/", ("http://mirror",))
SOURCE = SourcePlan(LOCKED, "/s/org--name", HUB, DownloadSettings())


def read(work, name):
    return json.loads({file.path: file.content for file in work.files()}[f"{work.job.dir}/{name}"])


def digests(works):
    return [work.job.digest for work in works]


def test_mirrors_are_tried_before_the_hub():
    assert read(fetch_job(SOURCE), "fetch.json")["urls"] == [
        f"http://{host}/org/name/resolve/{'a' * 40}/" for host in ("mirror", "hub")
    ]


def test_download_digest_depends_only_on_the_content():
    digest = fetch_job(SOURCE).job.digest
    elsewhere = replace(SOURCE, hub=HubSettings(), downloads=DownloadSettings(outage_s=1))
    assert fetch_job(elsewhere).job.digest == digest
    other = replace(LOCKED, files=(SourceFile("a.safetensors", 10, sha256="e" * 64),))
    assert fetch_job(replace(SOURCE, locked=other)).job.digest != digest


def test_retry_settings_reach_downloads_and_builds():
    works = plan_jobs(plan_of(**{"downloads.outage_s": 0}), ())
    for order in (read(works[0], "fetch.json"), read(works[1], "plan.json")["donor"]):
        assert (order["tries"], order["backoff_s"]) == (2, 1.0)
    assert digests(works) == digests(plan_jobs(plan_of(), ()))


def test_each_job_with_hub_access_has_its_own_token_file():
    works = plan_jobs(plan_of(**{"hub.token": {"env": "TOKEN"}}), ())
    fetch, build, image = works
    for work, order in (
        (fetch, read(fetch, "fetch.json")),
        (build, read(build, "plan.json")["donor"]),
    ):
        assert order["token_file"] == f"{work.job.dir}/hub-token"
        assert work.hub is not None
    assert image.hub is None
    assert digests(works) == digests(plan_jobs(plan_of(), ()))


def test_image_job_waits_for_docker_and_has_its_build_context():
    plan = ImagePlan(
        base="r/b@sha256:" + "1" * 64, tag="spark-vllm:x", digest="3" * 64,
        context_digest="2" * 64, plugin=True, size_bytes=1,
        layers=LayersPlan(digest="4" * 64, reference="r/b@sha256:0", plain=False, out="/s"),
    )  # fmt: skip
    work = image_job(plan, (ManagedFile("Dockerfile", b"FROM x\n"),))
    files = {file.path: file.content for file in work.files()}
    assert files[f"{work.job.dir}/context/Dockerfile"] == b"FROM x\n"
    order = files[f"/etc/systemd/system/{work.job.unit}.d/order.conf"].decode()
    assert "Requires=docker.service" in order
    assert {f"BASE={plan.base}", f"spark.digest={plan.digest}"} <= set(work.job.argv)


def test_job_waits_for_its_target_filesystem():
    work = fetch_job(replace(SOURCE, dir="/big/50%/s"))
    files = {file.path: file.content.decode() for file in work.files()}
    assert files[f"/etc/systemd/system/{work.job.unit}.d/order.conf"] == (
        "[Unit]\nRequiresMountsFor=/big/50%%/s/receipt.json\n"
    )


def orders(model, profile):
    return {
        work.job.kind: json.loads(file.content)
        for work in plan_jobs(plan_of(model, profile), ())
        for file in work.inputs
        if file.path.endswith(("fetch.json", "plan.json"))
    }


@pytest.mark.parametrize("profile", CATALOG.profile_names)
@pytest.mark.parametrize("model", ["large", "small"])
def test_host_parses_job_plans_back_unchanged(model, profile):
    written = orders(model, profile)
    kinds: dict[str, Any] = {"fetch": FetchPlan}
    if CATALOG.profile(profile, model).builds_checkpoint:
        kinds["checkpoint"] = BuildPlan
    assert written.keys() == kinds.keys()
    for kind, document in written.items():
        assert documents.to_plain(documents.read(kinds[kind], document)) == document


@pytest.mark.parametrize("model", ["large", "small"])
def test_build_plan_lists_donor_shapes_for_swapped_modules(model):
    order, shape = orders(model, "v2")["checkpoint"], CATALOG.model(model).architecture
    shapes = {
        name: (part["weight"], part["scale"])
        for part in order["donor_shapes"]
        for name in expand_all([part["modules"]])
    }
    assert set(shapes) == expand_all(order["swap"])
    for name, (weight, scale) in shapes.items():
        expected = [shape.shared_expert_width, shape.hidden]
        if name.endswith("down_proj"):
            expected.reverse()
        assert (weight, scale) == (expected, [size // 128 for size in expected])


BASE = {"model": "large", "profile": "base"}
TURBOQUANT = {"model": "large", "profile": "v2-tq"}
SMALL = {"model": "small", "profile": "v2"}


def plan_ready(*pairs, **settings):
    return plan_of("large", "v2", keep_ready=list(pairs), **settings)


def test_kept_ready_model_adds_only_jobs_that_the_active_model_lacks():
    jobs = ready_jobs(plan_ready(SMALL), ())
    assert sorted(work.job.kind for work in jobs) == ["checkpoint", "fetch"]
    served, ready = plan_ready(), plan_ready(TURBOQUANT)
    assert ready_jobs(ready, ()) == ()
    assert [use.label for use in ready.disk if use not in served.disk] in ([], ["compile cache"])


def test_kept_ready_models_do_not_change_the_served_release():
    served, ready = plan_ready(), plan_ready({"model": "large", "profile": "v2"}, BASE, SMALL)
    assert [(pair.model, pair.profile) for pair in ready.ready] == [
        ("large", "base"),
        ("small", "v2"),
    ]
    assert ready.release == served.release
    assert plan_jobs(ready, ()) == plan_jobs(served, ())


def test_switching_to_a_kept_ready_model_needs_no_jobs():
    plan = plan_ready(SMALL, BASE)
    done = {*digests(plan_jobs(plan, ())), *digests(ready_jobs(plan, ()))}
    for pair in (SMALL, BASE):
        assert set(digests(plan_jobs(plan_of(pair["model"], pair["profile"]), ()))) <= done


def test_kept_ready_models_need_disk_images_and_locked_names():
    served, ready = plan_ready().preflight, plan_ready(BASE, SMALL).preflight
    added = sum(dict(ready.disk_needed_bytes).values())
    added -= sum(dict(served.disk_needed_bytes).values())
    assert added > sum(source.size_bytes for source in plan_of("small", "v2").sources)
    assert set(ready.images) > set(served.images)
    docker_bytes = dict(ready.disk_needed_bytes)[DOCKER_DIR]
    assert docker_bytes == sum(size for _, size in ready.image_bytes)
    wanted = required_names(settings_of(keep_ready=[SMALL]), CATALOG)
    assert any("small" in repo for repo, _ in wanted.sources)


def test_rejects_keep_ready_model_that_cannot_be_served():
    refusals = problems(keep_ready=[{"model": "huge", "profile": "v2"}])
    assert refusals
    assert all("keep_ready huge with v2" in problem.where for problem in refusals)


@pytest.mark.parametrize("pair", [BASE, SMALL, TURBOQUANT])
def test_pruning_keeps_files_of_kept_ready_models(pair):
    keep = keep_list(plan_ready(pair))
    for plan in (plan_ready(), plan_of(pair["model"], pair["profile"])):
        mounts = {mount.source for mount in plan.release.engine.mounts}
        assert {
            plan.served_checkpoint.dir,
            *(source.dir for source in plan.sources),
            *mounts,
        } <= set(keep.folders)
        assert {plan.image.tag, plan.image.base} <= set(keep.images)


def test_pruning_keeps_planned_release_and_configured_number_of_others():
    plan = plan_ready(**{"releases.keep": 4})
    keep = keep_list(plan)
    assert (keep.releases, keep.releases_kept) == ((plan.release.name,), 4)


TREE = "f" * 64
STATES: dict[str, State] = {
    "+": "complete", "~": "running", "-": "missing", "=": "not needed",
}  # fmt: skip


def members(states, digest=TREE):
    pairs = zip("abcdefgh", states, strict=False)
    return [Member(name, name, {digest: STATES[state]}) for name, state in pairs]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("----", {"a": "", "b": "a", "c": "ba", "d": "cba"}),
        ("-+--", {"a": "b", "c": "ba", "d": "bca"}),
        ("++--", {"c": "ab", "d": "bac"}),
        ("+++---", {"d": "abc", "e": "bcad", "f": "cabed"}),
        ("-~-", {"a": "b", "c": "ba"}),
        ("+~-", {"c": "ab"}),
        ("-", {"a": ""}),
    ],
)
def test_peers_with_all_files_come_first_and_their_order_rotates(states, expected):
    hosts = members(states)
    assert {name: "".join(peer_urls(name, TREE, hosts)) for name in expected} == expected


@pytest.mark.parametrize("states", ["----", "-+--", "-----", "+-------", "~--"])
def test_peer_plans_never_make_hosts_wait_for_each_other(states):
    hosts = members(states)
    missing = {host.name for host in hosts if host.trees[TREE] == "missing"}
    waits_for = {name: missing.intersection(peer_urls(name, TREE, hosts)) for name in missing}
    done: set[str] = set()
    while len(done) < len(missing):
        ready = {name for name in missing - done if waits_for[name] <= done}
        assert ready
        done |= ready
    assert sum(not peer_urls(name, TREE, hosts) for name in missing) <= 1


@pytest.mark.parametrize("complete", [0, 1, 3])
def test_peer_plan_limits_each_host_to_eight_copies_at_once(complete):
    states: list[State] = ["complete"] * complete + ["missing"] * (100 - complete)
    hosts = [Member(f"h{n}", f"h{n}", {TREE: state}) for n, state in enumerate(states)]
    urls = [peer_urls(host.name, TREE, hosts) for host in hosts[complete:]]
    assert max(Counter(peers[0] for peers in urls if peers).values()) <= 8
    assert sum(not peers for peers in urls) == (0 if complete else 1)


def test_shares_a_checkpoint_only_while_another_host_lacks_it():
    assert trees_to_share("a", members("++")) == frozenset()
    assert trees_to_share("a", members("+-")) == {TREE}
    assert trees_to_share("b", members("+-")) == frozenset()
    other = Member("b", "b", {"e" * 64: "missing"})
    assert trees_to_share("a", [*members("+"), other]) == frozenset()


WORKS = plan_jobs(plan_of("large", "v2"), ())
FETCH, BUILD, IMAGE = WORKS
[BUILD_TREE], [IMAGE_TREE] = shared_trees([BUILD]), shared_trees([IMAGE])


def with_peer(state, receipts):
    trees = {tree.digest: state for tree in shared_trees(WORKS)}
    return [
        Member("peer", "http://peer:1", trees, receipts),
        Member("me", "", dict.fromkeys(trees, "missing")),
    ]


def test_peers_are_added_only_to_fetch_plans():
    work = with_peers(FETCH, "me", with_peer("running", {}))
    assert work.job == FETCH.job
    [order], [original] = ([json.loads(f.content) for f in w.inputs] for w in (work, FETCH))
    assert order.pop("peers") == {"urls": ["http://peer:1"]}
    assert order == original


def test_built_checkpoint_is_copied_only_with_a_receipt_hash():
    work = with_peers(BUILD, "me", with_peer("complete", {BUILD_TREE.digest: "a" * 64}))
    plan, copy = work.inputs
    assert plan == BUILD.inputs[0]
    assert work.job.digest == BUILD.job.digest
    assert work.job.argv == (*BUILD.job.argv, "--or-copy", copy.path)
    order = documents.parse(CopyPlan, copy.content.decode())
    assert order == CopyPlan(BUILD_TREE.digest, (FinishedTree("http://peer:1", "a" * 64),))
    assert with_peers(BUILD, "me", with_peer("complete", {})) is BUILD


def test_jobs_are_unchanged_without_peers():
    alone = with_peer("complete", {})[1:]
    assert all(with_peers(work, "me", alone) is work for work in WORKS)
    assert with_peers(BUILD, "me", with_peer("missing", {})) is BUILD


def test_built_checkpoints_are_shared_only_when_complete():
    trees = shared_trees(WORKS)
    assert [tree.unfinished for tree in trees] == [True, False, True]
    assert [tree.job for tree in trees] == [work.job.digest12 for work in WORKS]


@pytest.mark.parametrize(
    ("states", "peers", "keeps"),
    [("---", {"a": "", "b": "a", "c": "ba"}, "a"), ("+=-", {"c": "a"}, "")],
)
def test_first_host_pulls_image_and_keeps_blobs_for_peers(states, peers, keeps):
    tool, command, *arguments = IMAGE.job.argv
    for name, urls in peers.items():
        work = with_peers(IMAGE, name, members(states, IMAGE_TREE.digest))
        [file] = [file for file in work.inputs if file.path.endswith("/layers.json")]
        assert work.job.argv == (tool, command, "--layers", file.path, *arguments)
        assert work.job.digest == IMAGE.job.digest
        order = documents.parse(LayersPlan, file.content.decode())
        assert order.peers == (Peers(tuple(urls)) if urls else None)
        assert order.keep == (name in keeps)


@pytest.mark.parametrize("states", ["-", "=-"])
def test_image_is_pulled_unchanged_if_not_shared(states):
    hosts = members(states, IMAGE_TREE.digest)
    assert with_peers(IMAGE, hosts[-1].name, hosts) is IMAGE
