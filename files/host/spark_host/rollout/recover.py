"""What a rollout that was killed left is finished or undone, by systemd, in the same run."""

from __future__ import annotations

from spark_contract.records import Rollout
from spark_contract.release import Release

from spark_host.records import boot
from spark_host.rollout import rollout, steps
from spark_host.rollout.ports import Host
from spark_host.rollout.record import Record
from spark_host.system.programs import log


def recover(name: str, host: Host) -> int:
    """Finish what a killed rollout left; nothing to do after one that ended by itself."""
    release = host.disk.load(name, host.paths)
    left = host.disk.read(Rollout, host.paths.rollout(name))
    ours = (host.boot_id, host.invocation_id)
    # A record of an earlier run of the unit, or of an earlier boot, is not our matter.
    if host.exit_status == "0":  # whatever a full disk has kept it from writing
        return 0
    if left is None or left.state != "running" or (left.boot_id, left.invocation_id) != ours:
        return 0
    if host.units.is_stopping():
        return 0
    with rollout.one_at_a_time(release.service, host):
        record = Record(release, host, left)
        old = host.release(left.previous)
        why = f"the rollout was killed in phase {left.phase}"
        log(why)
        record.set(reason=why, failed_phase=str(left.phase))
        # What runs and was only to be proven anew serves on.
        untouched = left.serving == name and left.phase == "check" and "drain" not in left.times_s
        if left.phase in (None, "prove") or untouched:
            record.end("refused", boot.active(release.service, host))
        elif left.phase in ("open", "enable", "bench") and steps.is_proven(release, host):
            _finish(release, old, host, record)
        else:
            rollout.back(release, old, host, record)
    return 0


def _finish(release: Release, old: Release | None, host: Host, record: Record) -> None:
    """Take the last steps of a rollout whose candidate was proven before it was killed."""
    try:
        steps.take_over(release, host, record)
    except steps.FAILURES as error:
        why = f"{record.data.reason}; and then: {error}"
        record.set(reason=why, failed_phase=record.data.phase)
        if record.data.serving == release.name:  # it was proven anew, not changed to
            record.end("refused", release.name)
        else:
            rollout.back(release, old, host, record)
    else:
        record.set(reason=None, failed_phase=None)
        record.end("switched", release.name)
