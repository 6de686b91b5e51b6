"""The slow work of a plan as jobs: what systemd runs on the host while nobody watches.

The formats are the contract with the host tools: ``job.json`` (files/host), ``fetch.json`` and
``plan.json`` (files/checkpoint).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from spark_contract.documents import read, text_of
from spark_contract.orders import BuildPlan, FetchFile, FetchPlan

from spark_deploy.managed import ManagedFile
from spark_deploy.planning.digest import digest_of
from spark_deploy.planning.types import (
    CheckpointPlan,
    HostPlan,
    ImagePlan,
    PairPlan,
    Paths,
    SourcePlan,
)

HUB_TOKEN_NAME = "hub-token"  # 0600 in config_dir; only its path enters a job


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of slow work; ``inputs`` are files that lie beside ``job.json``."""

    digest: str
    kind: str  # "fetch" | "checkpoint" | "image-build" | "image-pull" | "discard"
    title: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    proof: dict[str, str]
    total_bytes: int | None
    after: tuple[str, ...]  # digest12 of jobs that must have succeeded before
    inputs: tuple[ManagedFile, ...]
    dir: str
    # A tree's receipt and digest that make the work needless.
    unless: tuple[tuple[str, str], ...] = ()

    @property
    def digest12(self) -> str:
        """The instance name of the job's unit."""
        return self.digest[:12]

    @property
    def unit(self) -> str:
        """Name of the systemd unit."""
        return f"spark-job@{self.digest12}.service"

    def files(self) -> tuple[ManagedFile, ...]:
        """Return job.json, its inputs, and the unit's ordering."""
        described: dict[str, Any] = {
            "schema_version": 1,
            "digest": self.digest,
            "kind": self.kind,
            "title": self.title,
            "argv": list(self.argv),
            "env": dict(self.env),
            "proof": self.proof,
            "total_bytes": self.total_bytes,
            "after": list(self.after),
            **({"unless": dict(self.unless)} if self.unless else {}),
        }
        files = [*self.inputs, ManagedFile(f"{self.dir}/job.json", _json(described))]
        path = f"/etc/systemd/system/{self.unit}.d/order.conf"
        return (*files, ManagedFile(path, self._order().encode()))

    def _order(self) -> str:
        """Return the drop-in that says what has to be there before the job."""
        units = [f"spark-job@{digest12}.service" for digest12 in self.after]
        if self.kind.startswith("image"):
            units.append("docker.service")
        text = f"Requires={' '.join(units)}\nAfter={' '.join(units)}\n" if units else ""
        if "receipt" in self.proof:
            # Else a boot without that disk would fill the root's.
            text += needs_mounts(self.proof["receipt"])
        return f"[Unit]\n{text}"


def needs_mounts(*paths: str) -> str:
    """Return the line of a unit that waits for the file systems of ``paths``."""
    return f"RequiresMountsFor={' '.join(path.replace('%', '%%') for path in paths)}\n"


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _job_dir(paths: Paths, digest: str) -> str:
    return f"{paths.state_dir}/jobs/{digest[:12]}"


def _python_env(paths: Paths) -> tuple[tuple[str, str], ...]:
    return (("PYTHONPATH", f"{paths.tools_dir}/current:{paths.tools_dir}/site"),)


def _token_file(paths: Paths, needed: bool) -> str | None:
    return f"{paths.config_dir}/{HUB_TOKEN_NAME}" if needed else None


def _patience(source: SourcePlan) -> dict[str, Any]:
    """Return how long the builder goes on asking a hub that sends nothing."""
    return {"tries": source.tries, "backoff_s": source.retry_pause_s}


def fetch_job(source: SourcePlan, paths: Paths, tree: CheckpointPlan | None = None) -> Job:
    """Fetch one repository at its commit, every file checked against the lock.

    Args:
        source: the repository.
        paths: host paths.
        tree: what is built from it; when that keeps no base, nothing is fetched once it is there.
    """
    identity = {"kind": "fetch", "source": source.digest, "dir": source.dir}
    unless: tuple[tuple[str, str], ...] = ()
    if tree is not None and not tree.keep_base:
        unless = (("receipt", f"{tree.dir}/receipt.json"), ("digest", tree.digest))
        identity["unless"] = tree.digest
    digest = digest_of(identity)
    where = _job_dir(paths, digest)
    urls = [
        f"{root.rstrip('/')}/{source.repo}/resolve/{source.commit}/"
        for root in (*source.mirrors, source.endpoint)
    ]
    order = FetchPlan(
        digest=source.digest,
        name=source.repo,
        commit=source.commit,
        out=source.dir,
        files=tuple(
            FetchFile(one.path, one.size_bytes, sha256=one.sha256)
            if one.sha256
            else FetchFile(one.path, one.size_bytes, git_sha1=one.git_sha1)
            for one in source.files
        ),
        urls=tuple(urls),
        pieces=tree is not None and tree.builder["layout"] == "full",
        look_in=source.look_in,
        token_file=_token_file(paths, source.token_needed),
        parallel=source.parallel,
        rate_limit_bytes_per_s=source.rate_limit_bytes_per_s,
        **_patience(source),
    )
    return Job(
        digest=digest,
        kind="fetch",
        title=f"fetch {source.repo}@{source.commit[:12]}",
        argv=("python3", "-m", "spark_checkpoint", "fetch", f"{where}/fetch.json"),
        env=_python_env(paths),
        proof={"receipt": f"{source.dir}/receipt.json", "digest": source.digest},
        total_bytes=source.size_bytes,
        after=(),
        inputs=(ManagedFile(f"{where}/fetch.json", text_of(order).encode()),),
        dir=where,
        unless=unless,
    )


def checkpoint_job(plan: CheckpointPlan, paths: Paths, fetched: Job) -> Job:
    """Build the hybrid tree from the fetched base and ranges of the donor."""
    digest = digest_of({"kind": "checkpoint", "checkpoint": plan.digest, "dir": plan.dir})
    where = _job_dir(paths, digest)
    document = {
        **plan.builder,
        "schema_version": 1,
        "digest": plan.digest,
        "name": plan.name,
        "base": {"dir": plan.base.dir, "revision": plan.base.commit},
        "out": plan.dir,
    }
    if plan.donor_url is not None:
        document["donor"] = {"url": plan.donor_url, **_patience(plan.base)}
        token = _token_file(paths, plan.base.token_needed)
        if token is not None:
            document["donor"]["token_file"] = token
    return Job(
        digest=digest,
        kind="checkpoint",
        title=f"build {plan.name}-{plan.digest[:12]}",
        argv=("python3", "-m", "spark_checkpoint", "build", f"{where}/plan.json"),
        env=_python_env(paths),
        proof={"receipt": f"{plan.dir}/receipt.json", "digest": plan.digest},
        total_bytes=plan.output_bytes,
        after=(fetched.digest12,),
        inputs=(ManagedFile(f"{where}/plan.json", text_of(read(BuildPlan, document)).encode()),),
        dir=where,
    )


def discard_jobs_of(plan: HostPlan) -> tuple[Job, ...]:
    """Return the removal of a base that is not kept: the last work, after the proof."""
    tree = plan.checkpoint
    if tree is None or tree.keep_base:
        return ()
    digest = digest_of({"kind": "discard", "base": tree.base.dir, "tree": tree.dir})
    where = _job_dir(plan.paths, digest)
    job = Job(
        digest=digest,
        kind="discard",
        title=f"remove {tree.base.repo}@{tree.base.commit[:12]}",
        argv=("python3", "-m", "spark_checkpoint", "discard", tree.base.dir, "--tree", tree.dir),
        env=_python_env(plan.paths),
        proof={"absent": tree.base.dir},
        total_bytes=tree.output_bytes,
        after=(),
        inputs=(),
        dir=where,
    )
    return (job,)


def image_job(plan: ImagePlan, paths: Paths, context: tuple[ManagedFile, ...]) -> Job:
    """Build the engine image, or pull it where no plugin is wanted.

    Args:
        plan: the image slice.
        paths: host paths.
        context: the build context, with paths relative to its root.
    """
    kind = "image-pull" if plan.pull_only else "image-build"
    digest = digest_of({"kind": kind, "image": plan.digest})
    where = _job_dir(paths, digest)
    if plan.pull_only:
        argv: tuple[str, ...] = ("docker", "pull", "--quiet", plan.base)
        proof = {"image": plan.base}
        inputs: tuple[ManagedFile, ...] = ()
    else:
        argv = (
            "docker", "build", "--network", "none", "--tag", plan.tag,
            "--build-arg", f"BASE={plan.base}",
            "--label", f"spark.digest={plan.digest}", f"{where}/context",
        )  # fmt: skip
        proof = {"image": plan.tag, "label": plan.digest}
        inputs = tuple(
            ManagedFile(f"{where}/context/{file.path}", file.content, file.mode) for file in context
        )
    return Job(
        digest=digest,
        kind=kind,
        title=f"{'pull' if plan.pull_only else 'build'} image {plan.tag}",
        argv=argv,
        env=(),
        proof=proof,
        total_bytes=None,
        after=(),
        inputs=inputs,
        dir=where,
    )


def jobs_of(plan: HostPlan, context: tuple[ManagedFile, ...]) -> tuple[Job, ...]:
    """Return every job of what a plan serves, in an order that respects ``after``."""
    served = PairPlan(plan.model, plan.profile, plan.sources, plan.checkpoint, plan.image, "")
    return jobs_of_pair(served, plan.paths, context)


def ready_jobs_of(plan: HostPlan, context: tuple[ManagedFile, ...]) -> tuple[Job, ...]:
    """Return the jobs that only the pairs to have ready need."""
    served = {job.digest for job in jobs_of(plan, context)}
    more = {
        job.digest: job
        for pair in plan.ready
        for job in jobs_of_pair(pair, plan.paths, context)
        if job.digest not in served
    }
    return tuple(more.values())


def ready_name(job: Job) -> str:
    """Return what the operation for a job of a pair to have ready is called."""
    return f"Have ready: {job.title}"


def jobs_of_pair(pair: PairPlan, paths: Paths, context: tuple[ManagedFile, ...]) -> tuple[Job, ...]:
    """Return every job of one model and profile, in an order that respects ``after``."""
    fetches = {source.repo: fetch_job(source, paths, pair.checkpoint) for source in pair.sources}
    jobs = list(fetches.values())
    if pair.checkpoint is not None:
        base = fetches[pair.checkpoint.base.repo]
        jobs.append(checkpoint_job(pair.checkpoint, paths, base))
    jobs.append(image_job(pair.image, paths, context))
    return tuple(jobs)
