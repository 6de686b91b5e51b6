"""What pruning must leave on a host beside the releases it keeps: all that the plan uses."""

from __future__ import annotations

from spark_contract.work.keep import Keep

from spark_deploy.planning.types import HostPlan


def keep_of(plan: HostPlan) -> Keep:
    """Return what ``spark-host prune`` reads."""
    releases = [one.serve for one in plan.served] + [one.release for one in plan.schedule]
    folders = {mount.source for release in releases for mount in release.engine.mounts}
    images = {plan.docker.check_image}
    for pair in (*plan.served, *plan.ready):
        # Of a 16-bit repository nothing is needed once its INT4 tree is there.
        made = {pair.requantized.dir} if pair.requantized else set()
        folders |= {pair.cache_dir, pair.tree.dir, *(one.dir for one in pair.fetched)} | made
        images |= {pair.image.tag, pair.image.base}
    return Keep(
        releases_kept=plan.releases_kept,
        releases=frozenset(release.name for release in releases),
        folders=frozenset(folders),
        images=frozenset(images),
        models_dir=plan.paths.models_dir,
        sources_dir=plan.paths.sources_dir,
        cache_dir=plan.paths.cache_dir,
    )
