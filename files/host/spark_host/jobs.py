"""Runs jobs and reports their states."""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from spark_contract import files, receipts, units
from spark_contract.documents import to_plain
from spark_contract.job import (
    CHECKPOINT_JOB,
    AbsenceProof,
    Job,
    JobMemory,
    JobRun,
    JobState,
    ReceiptProof,
    State,
    parse_progress,
)
from spark_contract.machine import GIB
from spark_contract.paths import JOBS_DIR, Paths, hub_token_file
from spark_contract.tool import ERROR, PHASE, HostToolError, Problem

from spark_host.engine.memory import meminfo
from spark_host.system import docker, systemd
from spark_host.system.host import Host, read_document, release_names, write_document
from spark_host.system.programs import log

STATUS = "status.json"
_TAIL_LINES = 20
_TAIL_PERIOD_S = 2.0
# Time without progress after which a job is killed. Downloads that wait for a hub print retries.
_STALL_TIMEOUT_S = 2 * 3600.0
_STOP_TIMEOUT_S = 60.0
_TOKEN_UNUSED_S = 60.0  # a job reads the token within this time


def load_job(digest12: str, paths: Paths) -> Job:
    return files.load(Job, paths.job(digest12) / "job.json", "no such job")


def all_digests(paths: Paths) -> list[str]:
    return sorted(path.parent.name for path in paths.below(JOBS_DIR).glob("*/job.json"))


def is_done(job: Job, paths: Paths) -> bool:
    """Return whether the job is done; a removal counts as done while releases use the tree."""
    if job.unless and has_valid_receipt(job.unless):
        return True
    proof = job.proof
    if isinstance(proof, ReceiptProof):
        return has_valid_receipt(proof)
    if isinstance(proof, AbsenceProof):
        return not Path(proof.absent).exists() or bool(_releases_using(proof, paths))
    if proof.label is not None:
        return docker.image_label(proof.image) == proof.label
    return docker.inspect_image(proof.image) is not None


def _releases_using(proof: AbsenceProof, paths: Paths) -> list[str]:
    path = Path(proof.absent)
    releases = filter(None, map(Host(paths).release, release_names(paths)))
    return [r.name for r in releases if path in (Path(tree.path) for tree in r.trees)]


def has_valid_receipt(proof: ReceiptProof) -> bool:
    path = Path(proof.tree)
    receipt = receipts.find_receipt(path)
    is_complete = receipt and receipt.digest == proof.digest and receipt.is_complete(path)
    return bool(is_complete) and receipts.find_writable_by_others(path) is None


def run(digest12: str, paths: Paths) -> int:
    """Run a job unless the result exists; write a status file."""
    job = load_job(digest12, paths)
    folder = paths.job(digest12)
    if is_done(job, paths):
        users = _releases_using(job.proof, paths) if isinstance(job.proof, AbsenceProof) else []
        names = ", ".join(users)
        reason = f"kept, because the releases {names} use it" if users else "already done"
        log(f"{job.title}: {reason}")
        last = read_document(JobRun, folder / STATUS)
        write_document(folder / STATUS, JobRun("done", 0, memory=last.memory if last else None))
        return 0
    started = files.now()
    for pattern in (".progress.*", "progress", ".tail.*", "tail"):
        for path in folder.glob(pattern):
            files.remove(path)
    write_document(folder / STATUS, JobRun("running", None, started))
    renamed = _rename_incomplete(job)
    before = meminfo()
    code, tail = _execute(job, folder)
    after = meminfo()
    memory = JobMemory(before["MemFree"], after["MemFree"], before["Cached"], after["Cached"])
    changes = (
        f"{key} was {before[key] / GIB:.2f} GiB before and {after[key] / GIB:.2f} GiB after"
        for key in ("MemFree", "Cached")
    )
    log(f"memory: {', '.join(changes)}")
    succeeded = code == 0 and is_done(job, paths)
    if succeeded and renamed is not None:
        shutil.rmtree(renamed, ignore_errors=True)
    if code == 0 and not succeeded:
        tail.append(f"{ERROR}{job.title}: finished without a valid result: {to_plain(job.proof)}")
        log(tail[-1])
        code = 5
    try:
        ended = JobRun("failed" if code else "done", code, started, tuple(tail), memory)
        write_document(folder / STATUS, ended)
    except OSError as error:
        # On a full disk, only the journal contains the result.
        log(f"cannot write {folder / STATUS}: error number {error.errno}")
    return code


def _rename_incomplete(job: Job) -> Path | None:
    """Rename an incomplete checkpoint and return the new path.

    The fetcher reuses intact files from this path until the job has succeeded.
    """
    if not isinstance(job.proof, ReceiptProof):
        return None
    path = Path(job.proof.tree)
    renamed = path.with_name(f"{path.name}.damaged")
    if path.is_dir() and units.TREE_NAME.match(path.name):
        log(f"{job.title}: {path} is incomplete; building it again")
        shutil.rmtree(renamed, ignore_errors=True)
        path.rename(renamed)
    return renamed if renamed.exists() else None


def _execute(job: Job, folder: Path) -> tuple[int, list[str]]:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        child = subprocess.Popen(
            job.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **job.env}, cwd=folder, text=True, errors="replace", bufsize=1,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        line = ERROR + Problem(job.argv[0], str(error.strerror), "run the deploy again").line
        log(line)
        return 4, [line]
    # After SIGTERM, the child leaves a state from which it can resume.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: child.send_signal(signal.SIGTERM))
    tail_written_at = 0.0
    try:
        for text in _lines_until_stall(child):
            log(text)
            tail.append(text)
            # A full disk must not hide the job's own error.
            with contextlib.suppress(OSError):
                if text.startswith(PHASE):
                    files.write_text(folder / "progress", text + "\n")
                elif time.monotonic() - tail_written_at > _TAIL_PERIOD_S:
                    files.write_text(folder / "tail", "\n".join(tail) + "\n")
                    tail_written_at = time.monotonic()
        return child.wait(_STALL_TIMEOUT_S), list(tail)
    except (TimeoutError, subprocess.TimeoutExpired):
        _end_process_group(child)
        message = f"no progress for {_STALL_TIMEOUT_S:.0f} s"
        fix = "check the disk (`dmesg`) and the network, then deploy again to resume the job"
        tail.append(ERROR + Problem(job.title, message, fix).line)
        log(tail[-1])
        return 4, list(tail)


def _lines_until_stall(child: subprocess.Popen[str]) -> Iterator[str]:
    """Yield output lines until all writers have closed the pipe; raise TimeoutError after a stall.

    A thread reads the lines, because processes that the child started can keep the pipe open.
    """
    lines: queue.Queue[str | None] = queue.Queue(_TAIL_LINES)

    def read() -> None:
        for line in child.stdout or ():
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    progress_at, last_phase_and_bytes = time.monotonic(), ""
    while (remaining_s := progress_at + _STALL_TIMEOUT_S - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            text = lines.get(timeout=remaining_s)
            if text is None:
                return
            phase_and_bytes = text.partition(" total=")[0]
            # A progress line that repeats phase and bytes is no progress; any other line is.
            if phase_and_bytes != last_phase_and_bytes:
                progress_at = time.monotonic()
            if text.startswith(PHASE):
                last_phase_and_bytes = phase_and_bytes
            yield text
    raise TimeoutError


def _end_process_group(child: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_TIMEOUT_S)


def remove_tokens(digest12: str, paths: Paths, *, success: bool) -> None:
    """Remove a finished job's hub token; after a failure, also the tokens of dependent jobs."""
    if systemd.is_stopping():
        return  # the next boot continues the job
    for path in _token_files(digest12, paths):
        files.remove(path)
    if success:
        return
    for other in all_digests(paths):
        with contextlib.suppress(HostToolError):  # an unreadable job cannot start
            if digest12 in load_job(other, paths).after:
                remove_tokens(other, paths, success=False)


def _token_files(digest12: str, paths: Paths) -> list[Path]:
    token = paths.below(hub_token_file(digest12))
    return [*token.parent.glob(token.name), *token.parent.glob(f"{token.name}.*")]  # temporary


def remove_unused_tokens(paths: Paths) -> None:
    """Remove hub tokens of jobs that neither run nor wait, for example after a power cut."""
    digests = [path.name for path in paths.below(JOBS_DIR).glob("*") if path.is_dir()]
    if systemd.is_stopping() or not any(_token_files(digest, paths) for digest in digests):
        return
    states = systemd.show_loaded([units.JOB.unit("*")], ("ActiveState", "Job"))
    for digest in digests:
        unit = states.get(units.JOB.unit(digest), {})
        is_active = unit.get("ActiveState", "inactive") not in ("inactive", "failed")
        if is_active or systemd.is_queued(unit):
            continue
        for path in _token_files(digest, paths):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_ctime > _TOKEN_UNUSED_S:
                    files.remove(path)


def poll(digests: list[str], paths: Paths) -> list[JobState]:
    """Return the states of jobs; a job that requires a failed job has failed, too."""
    fields = ("ActiveState", "Result", "ExecMainStatus", "Job", "InvocationID")
    loaded = systemd.show_loaded([units.JOB.unit("*")], fields)
    states = {
        name: _job_state(name, loaded.get(units.JOB.unit(name), {}), paths) for name in digests
    }
    # If a dependency failed, systemd leaves the unit inactive, as if it had not started yet.
    changed = True
    while changed:
        changed = False
        for digest12 in [name for name in digests if states[name].state == "waiting"]:
            after = load_job(digest12, paths).after
            required = [states[other] for other in after if other in states]
            failed = next((other for other in required if other.state == "failed"), None)
            if failed:
                result = f"requires the failed job {failed.digest[:12]}"
                states[digest12] = replace(
                    states[digest12], state="failed", result=result, exit_code=None
                )
                changed = True
    return list(states.values())


def _job_state(digest12: str, unit: systemd.UnitState, paths: Paths) -> JobState:
    folder = paths.job(digest12)
    try:
        job = load_job(digest12, paths)
    except HostToolError as error:
        return JobState(
            digest=digest12, title=digest12, kind="", state="failed", result=str(error),
            exit_code=None, elapsed_s=None, progress=None, last_line=None, log_tail=(),
        )  # fmt: skip
    last = read_document(JobRun, folder / STATUS)
    state: State
    try:
        state, result = _find_state(job, unit, last, paths)
    except docker.DockerTimeoutError as error:
        state, result = "unknown", str(error)
    tail = list(last.last_lines if last else ()) or _read_lines(folder / "tail")
    if state == "failed" and last and last.state == "running":
        tail = systemd.journal(unit.get("InvocationID", ""), job.unit, _TAIL_LINES) or tail
    running = state == "running"
    progress = _read_lines(folder / "progress") if running else []
    elapsed_s = None
    if running and last and last.started_at:
        started = datetime.fromisoformat(last.started_at.replace("Z", "+00:00"))
        elapsed_s = int(time.time() - started.timestamp())
    return JobState(
        digest=job.digest,
        title=job.title,
        kind=job.kind,
        state=state,
        result=result,
        exit_code=last.exit_code if last else None,
        elapsed_s=elapsed_s,
        progress=parse_progress(progress[-1], job.total_bytes) if progress else None,
        last_line=tail[-1] if tail else None,
        log_tail=tuple(tail) if state == "failed" else (),
        memory=last.memory if last else None,
        donor_sha256=_donor_sha256(job) if state == "done" else None,
    )


def _donor_sha256(job: Job) -> str | None:
    """Return the hash of the donor's tensors in the receipt of a built checkpoint."""
    if job.kind != CHECKPOINT_JOB or not isinstance(job.proof, ReceiptProof):
        return None
    receipt = receipts.find_receipt(Path(job.proof.tree))
    return receipt.donor_sha256 if isinstance(receipt, receipts.CheckpointReceipt) else None


def _find_state(
    job: Job, unit: systemd.UnitState, last: JobRun | None, paths: Paths
) -> tuple[State, str]:
    active = unit.get("ActiveState", "inactive")
    if active in ("activating", "active", "reloading", "deactivating"):
        return "running", ""
    if systemd.is_queued(unit):
        return "waiting", "waiting for required jobs"
    if is_done(job, paths):
        return "done", "success"
    if active == "failed":
        return "failed", unit.get("Result", "failed")
    if last and last.state == "failed":
        return "failed", "exit-code"
    if last and last.state == "running":
        return "failed", "interrupted"
    return "waiting", "not started"


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def main(args: list[str], paths: Paths) -> int | list[JobState]:
    match args:
        case ["run", digest12]:
            return run(digest12, paths)
        case ["end", digest12]:
            remove_tokens(digest12, paths, success=os.environ.get("SERVICE_RESULT") == "success")
            remove_unused_tokens(paths)
            return 0
        case ["poll", *digests]:
            return poll(digests or all_digests(paths), paths)
    usage = "run `spark-host job run DIGEST`, `job end DIGEST` or `job poll DIGEST...`"
    raise HostToolError("job", f"invalid arguments {args}", usage, 2)
