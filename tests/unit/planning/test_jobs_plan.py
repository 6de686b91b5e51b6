"""Jobs carry everything systemd needs, and equal work has equal names."""

import json
from dataclasses import replace

from spark_deploy.lockfile.types import SourceFile
from spark_deploy.managed import ManagedFile
from spark_deploy.planning.types import CheckpointPlan, ImagePlan, SourcePlan
from spark_deploy.planning.work.jobs import checkpoint_job, fetch_job, image_job

SOURCE = SourcePlan(
    role="base", repo="org/name", commit="a" * 40, dir="/s/org--name",
    files=(SourceFile("a.safetensors", 10, sha256="b" * 64), SourceFile("c", 1, git_sha1="d" * 40)),
    endpoint="http://hub/", mirrors=("http://mirror",), look_in=("/home",), parallel=4,
    rate_limit_bytes_per_s=None, token_needed=False,
)  # fmt: skip


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

    assert fetch_job(replace(SOURCE, mirrors=(), parallel=1)).job.digest == work.job.digest
    other = (SourceFile("a.safetensors", 10, sha256="e" * 64),)
    assert fetch_job(replace(SOURCE, files=other)).job.digest != work.job.digest


BUILDER = {
    "swap": [], "block_shape": [128, 128], "base_tensors": ["a"], "donor_unmatched": [],
    "donor_shapes": [], "mtp_tensors": [], "shared_experts": "fp8-donor", "head": "keep",
    "layout": "overlay", "extra": {},
}  # fmt: skip


def test_how_long_a_hub_is_asked_is_the_users_word_for_fetches_and_builds() -> None:
    patient = replace(SOURCE, tries=3, retry_pause_s=0.5)
    commit = "c" * 40
    tree = CheckpointPlan(
        name="tree", dir="/m/tree", base=patient, donor_repo="o/d", donor_commit=commit,
        donor_url=f"http://hub/o/d/resolve/{commit}", builder=BUILDER, recipe_version=1,
        output_bytes=1, donor_bytes=1, keep_base=True, digest="f" * 64,
    )  # fmt: skip
    fetched = fetch_job(patient)
    built = checkpoint_job(tree, fetched.job)

    for order in (read(fetched, "fetch.json"), read(built, "plan.json")["donor"]):
        assert (order["tries"], order["backoff_s"]) == (3, 0.5)
    assert fetched.job.digest == fetch_job(SOURCE).job.digest


def test_a_token_reaches_a_job_only_as_the_path_of_its_file() -> None:
    work = fetch_job(replace(SOURCE, token_needed=True))

    assert read(work, "fetch.json")["token_file"] == "/etc/spark/hub-token"


def test_an_image_job_waits_for_the_container_engine_and_carries_its_context() -> None:
    plan = ImagePlan(
        base="r/b@sha256:" + "1" * 64, tag="spark-vllm:x", context_digest="2" * 64, plugin=True,
        supported_engines=("0.33.0",), pull_only=False, size_bytes=1,
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
