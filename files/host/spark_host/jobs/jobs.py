"""Jobs: anything slow, run by systemd, finished only when their proof is there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import IO

from spark_contract import files, receipts, units
from spark_contract.documents import plain
from spark_contract.errors import ERROR, HostToolError, Problem
from spark_contract.job import (
    AbsentProof,
    Job,
    JobMemory,
    JobRun,
    JobState,
    ReceiptProof,
    State,
    read_progress,
)
from spark_contract.paths import JOBS_DIR, Paths, hub_token_file
from spark_contract.tool import PHASE
from spark_contract.units import TREE_NAME

from spark_host.engine.memory import GIB, meminfo
from spark_host.system import disk, docker, systemd
from spark_host.system.ports import Host
from spark_host.system.programs import answer
from spark_host.system.stored import names

STATUS = "status.json"
_TAIL_LINES = 20
_TAIL_PERIOD_S = 2.0
_TOKEN_UNUSED_S = 60.0  # the command that writes a token starts its job next


def load(digest12: str, paths: Paths) -> Job:
    """Return the job, or raise ``HostToolError`` when it is absent or malformed."""
    return files.load(Job, paths.job(digest12) / "job.json", "no such job")


def proven(job: Job, paths: Paths) -> bool:
    """Return whether the job's proof is there, or the tree that makes the job needless."""
    if job.unless and _receipt_holds(job.unless):
        return True
    proof = job.proof
    if isinstance(proof, ReceiptProof):
        return _receipt_holds(proof)
    if isinstance(proof, AbsentProof):
        tree = Path(proof.absent)
        return not tree.exists() or bool(_users_of(tree, paths))
    if proof.label is not None:
        return docker.image_label(proof.image) == proof.label
    return docker.image(proof.image) is not None


def _users_of(tree: Path, paths: Paths) -> list[str]:
    """Return the releases that load a tree: it must outlive them."""
    found = (Host(paths).release(name) for name in names(paths))
    return [one.name for one in found if one and any(Path(each.path) == tree for each in one.trees)]


def _receipt_holds(proof: ReceiptProof) -> bool:
    tree = Path(proof.tree)
    receipt = receipts.found(tree)
    return (
        receipt is not None
        and receipt.digest == proof.digest
        and receipt.is_whole(tree)
        # Proven once says nothing of what others can change since.
        and receipts.exposed(tree) is None
    )


def run(digest12: str, paths: Paths) -> int:
    """Run a job in the foreground; 0 only when its proof is valid afterwards."""
    job = load(digest12, paths)
    directory = paths.job(digest12)
    if proven(job, paths):
        print(f"{job.title}: {_why_done(job, paths)}", flush=True)
        last = disk.read(JobRun, directory / STATUS)
        disk.write(directory / STATUS, JobRun("done", 0, memory=last.memory if last else None))
        return 0
    started = files.now()
    # With what was half written of them when an earlier run was killed.
    for left in (".progress.*", "progress", ".tail.*", "tail"):
        for path in directory.glob(left):
            files.remove(path)
    disk.write(directory / STATUS, JobRun("running", None, started))
    aside = _set_aside(job)
    before = meminfo()
    code, tail = _execute(job, directory)
    memory = _memory(before, meminfo())
    print(_in_words(memory), flush=True)
    if code == 0 and proven(job, paths) and aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    if code == 0 and not proven(job, paths):
        tail.append(f"{ERROR}{job.title}: ended without its proof {plain(job.proof)}")
        print(tail[-1], flush=True)
        code = 5
    try:
        ended = JobRun("failed" if code else "done", code, started, tuple(tail), memory)
        disk.write(directory / STATUS, ended)
    except OSError as error:
        # Where the disk is full the exit code and the journal tell it; see _entry.
        print(f"{directory / STATUS}: not written, errno {error.errno}", flush=True)
    return code


def end(digest12: str, paths: Paths, *, success: bool) -> None:
    """Remove the hub's token of a job that ended, and of those that will not start without it."""
    if systemd.is_stopping():
        return  # the next boot goes on with the job
    for path in _token_files(digest12, paths):
        files.remove(path)
    for other in () if success else all_digests(paths):
        with contextlib.suppress(HostToolError):  # an unreadable job cannot start
            if digest12 in load(other, paths).after:
                end(other, paths, success=False)


def _token_files(digest12: str, paths: Paths) -> list[Path]:
    token = paths.below(hub_token_file(digest12))
    return [*token.parent.glob(token.name), *token.parent.glob(f"{token.name}.*")]  # half written


def remove_unused_tokens(paths: Paths) -> None:
    """Remove the hub's token of each job that neither runs nor waits for its start.

    No end of a job removes it after a power cut, or where a mount that the job requires fails.
    """
    folders = sorted(path for path in paths.below(JOBS_DIR).glob("*") if path.is_dir())
    if systemd.is_stopping() or not any(_token_files(one.name, paths) for one in folders):
        return
    asked = systemd.loaded([units.JOB.of("*")], ("ActiveState", "Job"))
    for folder in folders:
        unit = asked.get(units.JOB.of(folder.name), {})
        is_active = unit.get("ActiveState", "inactive") not in ("inactive", "failed")
        if is_active or unit.get("Job", "0") not in ("", "0"):
            continue
        for path in _token_files(folder.name, paths):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_ctime > _TOKEN_UNUSED_S:
                    files.remove(path)


def _memory(before: Mapping[str, int], after: Mapping[str, int]) -> JobMemory:
    return JobMemory(before["MemFree"], after["MemFree"], before["Cached"], after["Cached"])


def _in_words(memory: JobMemory) -> str:
    numbers = (memory.free_before_bytes, memory.free_after_bytes, memory.cached_before_bytes,
               memory.cached_after_bytes)  # fmt: skip
    return "memory: MemFree {} before, {} after, Cached {} before, {} after".format(
        *(f"{one / GIB:.2f} GiB" for one in numbers)
    )


def _why_done(job: Job, paths: Paths) -> str:
    proof = job.proof
    users = _users_of(Path(proof.absent), paths) if isinstance(proof, AbsentProof) else []
    return f"kept, {', '.join(users)} can serve it" if users else "already done"


def _set_aside(job: Job) -> Path | None:
    """Move a tree without a valid proof out of the way; return where it is.

    Only a place whose name ends in twelve digits of an identity is ours to move. What is moved
    stays beside its old place until the work succeeded: the fetcher finds intact files there,
    and a running engine keeps the ones it has open.
    """
    if not isinstance(job.proof, ReceiptProof):
        return None
    tree = Path(job.proof.tree)
    aside = tree.with_name(f"{tree.name}.damaged")
    if tree.is_dir() and TREE_NAME.match(tree.name):
        print(f"{job.title}: {tree} is not whole; made anew", flush=True)
        shutil.rmtree(aside, ignore_errors=True)
        tree.rename(aside)
    return aside if aside.exists() else None


def _execute(job: Job, directory: Path) -> tuple[int, list[str]]:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        child = subprocess.Popen(
            job.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **job.env},
            cwd=directory,
            text=True,
            errors="replace",
            bufsize=1,
        )
    except OSError as error:
        line = ERROR + Problem(job.argv[0], str(error.strerror), "run the deploy again").line
        print(line, flush=True)
        return 4, [line]
    # A stop of the unit reaches the child first, so that it can leave a resumable state.
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    _follow(child.stdout, directory, tail)
    return child.wait(), list(tail)


def _follow(output: IO[str] | None, directory: Path, tail: deque[str]) -> None:
    written = 0.0
    for line in output or ():
        text = line.rstrip("\n")
        print(text, flush=True)
        tail.append(text)
        # For people who look; a disk too full for it must not end the work without its own words.
        with contextlib.suppress(OSError):
            if text.startswith(PHASE):
                files.write_text(directory / "progress", text + "\n")
            elif time.monotonic() - written > _TAIL_PERIOD_S:
                files.write_text(directory / "tail", "\n".join(tail) + "\n")
                written = time.monotonic()


def poll(digests: list[str], paths: Paths) -> list[JobState]:
    """Return one state per job: what it is, where it stands, what it last said."""
    fields = ("ActiveState", "Result", "ExecMainStatus", "Job", "InvocationID")
    asked = systemd.loaded([units.JOB.of("*")], fields)
    states = {one: _state(one, asked.get(units.JOB.of(one), {}), paths) for one in digests}
    return _with_dependencies(states, paths)


def _with_dependencies(states: dict[str, JobState], paths: Paths) -> list[JobState]:
    # systemd drops the start of a job whose dependency failed and leaves the unit inactive,
    # which looks like "not started yet".
    changed = True
    while changed:
        changed = False
        for digest12, one in states.items():
            if one.state != "waiting":
                continue
            after = [dep for dep in load(digest12, paths).after if dep in states]
            broken = [dep for dep in after if states[dep].state == "failed"]
            if broken:
                why = f"needs the failed job {broken[0]}"
                states[digest12] = replace(one, state="failed", result=why, exit_code=None)
                changed = True
    return list(states.values())


def all_digests(paths: Paths) -> list[str]:
    """Return the digests of all jobs this host knows."""
    return sorted(path.parent.name for path in paths.below(JOBS_DIR).glob("*/job.json"))


def _state(digest12: str, unit: systemd.UnitState, paths: Paths) -> JobState:
    directory = paths.job(digest12)
    try:
        job = load(digest12, paths)
    except HostToolError as error:
        return JobState(digest12, digest12, "", "failed", str(error), None, None, None, None, ())
    last = disk.read(JobRun, directory / STATUS)
    state: State
    try:
        state, result = _judge(job, unit, last, paths)
    except docker.DaemonSilent as error:
        state, result = "unknown", str(error)
    tail = list(last.last_lines if last else ()) or _lines_of(directory / "tail")
    if state == "failed" and last and last.state == "running":
        tail = systemd.journal(unit.get("InvocationID", ""), job.unit, _TAIL_LINES) or tail
    told = _lines_of(directory / "progress") if state == "running" else []
    return JobState(
        digest=job.digest,
        title=job.title,
        kind=job.kind,
        state=state,
        result=result,
        exit_code=last.exit_code if last else None,
        elapsed_s=_elapsed_s(last) if state == "running" else None,
        progress=read_progress(told[-1], job.total_bytes) if told else None,
        last_line=tail[-1] if tail else None,
        log_tail=tuple(tail) if state == "failed" else (),
        memory=last.memory if last else None,
    )


def _judge(
    job: Job, unit: systemd.UnitState, last: JobRun | None, paths: Paths
) -> tuple[State, str]:
    active = unit.get("ActiveState", "inactive")
    if active in ("activating", "active", "reloading", "deactivating"):
        return "running", ""
    if unit.get("Job", "0") not in ("", "0"):
        return "waiting", "waits for the jobs before it"
    if proven(job, paths):
        return "done", "success"
    if active == "failed":
        return "failed", unit.get("Result", "failed")
    if last and last.state == "failed":
        return "failed", "exit-code"
    if last and last.state == "running":
        return "failed", "interrupted"
    return "waiting", "not started"


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _elapsed_s(last: JobRun | None) -> int | None:
    if last is None or last.started_at is None:
        return None
    started = datetime.fromisoformat(last.started_at.replace("Z", "+00:00"))
    return int(time.time() - started.timestamp())


def main(words: list[str], paths: Paths) -> int:
    """Run ``job run D12``, ``job end D12`` or ``job poll D12...``."""
    if len(words) == 2 and words[0] == "run":
        return run(words[1], paths)
    if len(words) == 2 and words[0] == "end":
        end(words[1], paths, success=os.environ.get("SERVICE_RESULT") == "success")
        remove_unused_tokens(paths)
        return 0
    if words[:1] == ["poll"]:
        answer(poll(words[1:] or all_digests(paths), paths))
        return 0
    raise HostToolError(
        "job", f"unknown words {words}", "job run D12 | job end D12 | job poll D12...", 2
    )
