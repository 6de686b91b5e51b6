"""What is said of a rollout that a host is carrying out, whoever began it."""

from __future__ import annotations

from spark_contract.serving.status import UnderWay

from spark_deploy.cli.changes.transcript import phase_said
from spark_deploy.facts.service.serve import HostStatus


def rollout_text(status: HostStatus, there: UnderWay) -> str:
    """Say which rollout a host carries out, since when, and how far it is."""
    release = status.release(there.release)
    what = f"{release.model} with {release.profile}" if release else there.release
    since = f" since {there.since}" if there.since else ""
    return f"rollout of {what} is under way{since} ({phase_said(there.phase or 'waiting')})"
