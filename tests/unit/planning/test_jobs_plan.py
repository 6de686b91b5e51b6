"""Jobs carry everything systemd needs, and equal work has equal names."""

import json
from dataclasses import replace

from spark_contract.fetching import LayersPlan

from spark_deploy.config.settings.sources import DownloadSettings, HubSettings
from spark_deploy.lock.types import LockedSource, SourceFile
from spark_deploy.plan.jobs import fetch_job, image_job, jobs_of
from spark_deploy.plan.types import ImagePlan, ManagedFile, SourcePlan
from tests.unit.planning.plans import plan_of

FILES = (SourceFile("a.safetensors", 10, sha256="b" * 64), SourceFile("c", 1, git_sha1="d" * 40))
LOCKED = LockedSource("org/name", "main", "a" * 40, FILES)
HUB = HubSettings("http://hub/", ("http://mirror",))
SOURCE = SourcePlan(LOCKED, "/s/org--name", HUB, DownloadSettings())


def read(work, name):
    return json.loads({file.path: file.content for file in work.files()}[f"{work.job.dir}/{name}"])


def test_mirrors_are_asked_before_the_hub() -> None:
    fetch = read(fetch_job(SOURCE), "fetch.json")

    assert fetch["urls"] == [
        f"http://mirror/org/name/resolve/{'a' * 40}/",
        f"http://hub/org/name/resolve/{'a' * 40}/",
    ]


def test_where_bytes_come_from_does_not_rename_the_work_but_what_they_are_does() -> None:
    work = fetch_job(SOURCE)

    elsewhere = replace(SOURCE, hub=HubSettings(), downloads=DownloadSettings(parallel=1))
    assert fetch_job(elsewhere).job.digest == work.job.digest
    other = replace(LOCKED, files=(SourceFile("a.safetensors", 10, sha256="e" * 64),))
    assert fetch_job(replace(SOURCE, locked=other)).job.digest != work.job.digest


def test_how_long_a_hub_is_asked_is_the_users_word_for_fetches_and_builds() -> None:
    patient, usual = plan_of(**{"downloads.tries": 3, "downloads.retry_pause_s": 0.5}), plan_of()
    fetched, built, _ = jobs_of(patient, ())

    for order in (read(fetched, "fetch.json"), read(built, "plan.json")["donor"]):
        assert (order["tries"], order["backoff_s"]) == (3, 0.5)
    assert [work.job.digest for work in (fetched, built)] == [
        work.job.digest for work in jobs_of(usual, ())[:2]
    ]


def test_each_job_that_asks_the_hub_reads_a_token_of_its_own() -> None:
    fetched, built, image = jobs_of(plan_of(**{"hub.token": {"env": "TOKEN"}}), ())

    for work, order in (
        (fetched, read(fetched, "fetch.json")),
        (built, read(built, "plan.json")["donor"]),
    ):
        assert order["token_file"] == f"{work.job.dir}/hub-token"
        assert work.hub is not None
    assert image.hub is None


def test_a_token_is_no_reason_to_fetch_or_build_anew() -> None:
    with_token, without = plan_of(**{"hub.token": {"env": "TOKEN"}}), plan_of()
    assert [work.job.digest for work in jobs_of(with_token, ())] == [
        work.job.digest for work in jobs_of(without, ())
    ]


def test_an_image_job_waits_for_the_container_engine_and_carries_its_context() -> None:
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
    assert f"BASE={plan.base}" in work.job.argv
    assert f"spark.digest={plan.digest}" in work.job.argv


def test_work_waits_for_the_file_system_it_writes_to() -> None:
    work = fetch_job(replace(SOURCE, dir="/big/50%/s"))
    files = {file.path: file.content.decode() for file in work.files()}

    assert files[f"/etc/systemd/system/{work.job.unit}.d/order.conf"] == (
        "[Unit]\nRequiresMountsFor=/big/50%%/s/receipt.json\n"
    )
