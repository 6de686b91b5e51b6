"""``spark-deploy status``: what each host serves, how well it is proven, what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import click
from pyinfra.api.host import Host
from spark_contract.documents import plain
from spark_contract.records import WayBack
from spark_contract.release import PREFIX_REUSE
from spark_contract.tool import SPEED
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli import managed_files
from spark_deploy.cli.hosts import Target, build_plan, select_hosts
from spark_deploy.cli.options import Options, shared_options
from spark_deploy.cli.query_hosts import Answer, query, read_status
from spark_deploy.cli.terminal import print_result
from spark_deploy.cli.up import rollout_text
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.status import Count, HostStatus, Requests
from spark_deploy.lock.file import read_lock
from spark_deploy.lock.resolve import wanted_by
from spark_deploy.plan.jobs import jobs_of
from spark_deploy.plan.memory import gib
from spark_deploy.plan.types import HostPlan


@click.command
@click.option("--files", is_flag=True, help="List managed files, packages and units, with sizes.")
@click.option("--planned", is_flag=True, help="With --files: what a deploy would create, offline.")
@shared_options(plans=True)
def status(options: Options, files: bool, planned: bool) -> int:
    """Exit with 1 if a host does not provably serve its plan."""
    if files:
        return managed_files.run(options, planned)
    if planned:
        raise SparkError.one("--planned", "lists files only", "add --files")
    counted: dict[str, dict[str, Count]] = {}

    def ask(host: Host, one: Target) -> HostStatus | None:
        found = read_status(host, one)
        services = found.told.services if found and found.told else {}
        if active := tuple(name for name, service in services.items() if service.active):
            counted[one.name] = host.get_fact(Requests, services=active)
        return found

    answers = query(select_hosts(options, judged=False), ask)
    found = [_with_requests(summary_of(one), counted.get(one.host.name, {})) for one in answers]
    print_result(options, found, map(lines, found), between="\n")
    return 0 if all(one["reachable"] and not one["drift"] for one in found) else 1


def _with_requests(summary: dict[str, Any], counted: Mapping[str, Count]) -> dict[str, Any]:
    """Put what engines have to do beside what they serve; nothing where none answers."""
    for one in summary.get("services", ()):
        one["requests"] = plain(counted.get(one["service"]))
    return {**summary, "requests": plain(counted.get(MAIN_SERVICE))}


def summary_of(said: Answer[HostStatus]) -> dict[str, Any]:
    """Return what is worth knowing of one host as plain data."""
    status = said.value
    if status is None:
        return {**said.data(), "drift": said.problem}
    plan, unplanned = _plan(said.host)
    scheduled = [one.release for one in plan.schedule] if plan else []
    wanted = status.due(plan.serve, scheduled).name if plan else None
    drift = status.unproven(MAIN_SERVICE, wanted) if wanted else unplanned
    beside = _beside(plan, status)
    others = "; ".join(f"{one['service']}: {one['drift']}" for one in beside if one["drift"])
    return {
        **said.data(),
        "installed": status.installed,
        "planned": wanted,
        "planned_pair": _named(status, wanted, plan),
        "unreadable": status.unreadable,
        "drift": drift or others,
        "ready": _readiness(plan, status) if plan else [],
        "services": beside,
        **told_by(status),
    }


def _beside(plan: HostPlan | None, status: HostStatus) -> list[dict[str, Any]]:
    """Say of every service beside the main one, planned or running, how it stands."""
    planned = {one.serve.service: one.serve.name for one in plan.services} if plan else {}
    running = {
        name: one for name, one in (status.told.services if status.told else {}).items()
        if name != MAIN_SERVICE and (one.active or one.enabled or name in planned)
    }  # fmt: skip
    found = []
    for name in sorted({*planned, *running}):
        active, wanted = running[name].active if name in running else None, planned.get(name)
        drift = status.unproven(name, wanted) if wanted else "is not listed any more"
        found.append({
            "service": name,
            "planned": wanted,
            **_serving(status, active),
            "stopped": status.stopped(name),
            "rollout": _rollout(status, name),
            "drift": "" if status.stopped(name) else drift,
        })  # fmt: skip
    return found


def _serving(status: HostStatus, active: str | None) -> dict[str, Any]:
    """Return what a service serves, and what its proof is worth now."""
    release, proof = status.release(active), {}
    if release:
        worth = {"current": release.unproven is None, "why": release.unproven}
        proof = {**(plain(release.proof) or {}), **worth, "speed": list(release.speed)}
    return {
        "release": active,
        "model": release.model if release else None,
        "profile": release.profile if release else None,
        "names": list(release.names) if release else [],
        "proof": proof,
        "live": plain(status.live(active) if active else None) or {},
    }


def told_by(status: HostStatus) -> dict[str, Any]:
    """Return what the host tools say of the main service and the host; of nothing, all empty."""
    told = plain(status.told) or {}
    service = status.service(MAIN_SERVICE)
    active = service.active if service else None
    release, back = status.release(active), service.rolled_back if service else None
    return {
        **_serving(status, active),
        "restarts": release.restarts if release else None,
        "memory": told.get("memory", {}),
        "versions": told.get("versions", {}),
        "versions_unknown": status.unknown_versions(),
        "reboot_pending": told.get("reboot_pending", ""),
        "stopped": status.stopped(MAIN_SERVICE),
        "rollout": _rollout(status, MAIN_SERVICE),
        "rolled_back": _gone_back(status, back) if back else None,
        "jobs": [job for job in told.get("jobs", ()) if job["state"] != "done"],
        "events": told.get("events", {}).get(MAIN_SERVICE, []),
        "daily": told.get("daily") or {},
    }


def _rollout(status: HostStatus, service: str) -> dict[str, Any] | None:
    there = status.rollout(service)
    return {**plain(there), "text": rollout_text(status, there)} if there else None


def _gone_back(status: HostStatus, back: WayBack) -> dict[str, Any]:
    pair = _named(status, back.came, None)
    return {"from": back.came, "from_pair": pair, "to": back.to, "at": back.at}


def _named(status: HostStatus, name: str | None, plan: HostPlan | None) -> str | None:
    """Return a release in people's words: of the host where it lies, else of the plan."""
    there = status.release(name)
    pair = plan if plan and plan.serve.name == name else there
    return f"{pair.model} with {pair.profile}, {name}" if pair else name


def _plan(host: Target) -> tuple[HostPlan | None, str]:
    """Return what the settings ask for, or why there is no plan."""
    lock = read_lock(host.settings.lock_path)
    try:
        if wanted_by(host.settings.settings, host.catalog).missing_in(lock).names:
            return None, "the plan is not locked yet"
        return build_plan(host), ""
    except SparkError as error:
        return None, f"what the settings choose cannot be served: {error.problems[0].line}"


def _readiness(plan: HostPlan, status: HostStatus) -> list[dict[str, Any]]:
    """Say of every pair to have ready which of its jobs have no proof yet."""
    done = {job.digest for job in status.told.jobs if job.state == "done"} if status.told else ()
    context = read_payload().image_context
    return [
        {
            "model": pair.model,
            "profile": pair.profile,
            "missing": [
                work.job.title for work in jobs_of(pair, context) if work.job.digest not in done
            ],
        }
        for pair in plan.ready
    ]


def lines(one: dict[str, Any]) -> Iterator[str]:
    """Yield the state of one host as lines for people."""
    if not one["reachable"]:
        yield f"{one['host']}: {one['problem']}"
    elif not one["installed"]:
        yield f"{one['host']}: nothing of ours is installed yet"
    else:
        yield f"{one['host']}: {_serves(one)}"
        wants = f" (wants {one['planned_pair']})" if one["drift"] and one["planned"] else ""
        yield f"  plan     {one['drift'] or 'as planned'}{wants}"
        if one["rollout"]:
            yield f"  rollout  {one['rollout']['text'].removeprefix('rollout ')}"
        yield from _details(one)
        for service in one["services"]:
            yield from _service_lines(service)


def _service_lines(one: dict[str, Any]) -> Iterator[str]:
    yield f"  service  {one['service']}: {one['stopped'] or _serves(one)}"
    if one.get("rollout"):
        yield f"           {one['rollout']['text']}"
    if one["drift"]:
        yield f"           {one['drift']} (wants {one['planned'] or 'nothing'})"
    elif one["proof"]:
        yield f"           {_proof(one['proof'])}"
    if one.get("requests"):
        yield f"           {_requests(one['requests'])}"


def _requests(counted: dict[str, int]) -> str:
    return f"{counted['running']} running, {counted['waiting']} waiting"


def _serves(one: dict[str, Any]) -> str:
    if one.get("unreadable"):
        return f"what it serves is not known: {one['unreadable']}"
    if not one["release"]:
        return "serves nothing"
    names = ", ".join(one["names"])
    return f"{one['model']} with {one['profile']} as {names} ({one['release']})"


def _details(one: dict[str, Any]) -> Iterator[str]:
    if one["proof"]:
        yield f"  proof    {_proof(one['proof'])}"
        for check in one["proof"].get("checks", ()):
            if check["name"] == PREFIX_REUSE and check["ok"]:  # what prefix caching is for
                yield f"  prefix   {check['detail']}"
            if not check["ok"] and check.get("weight") == "warn":
                yield f"  warned   {check['name']}: {check['detail']}"
        yield from _figures(one["proof"])
    if one["live"]:
        live = one["live"]
        said = f"answered in {live.get('seconds', 0):.1f} s"
        yield f"  live     {said if live.get('ok') else 'no answer: ' + str(live.get('detail'))}"
    if one.get("requests"):
        yield f"  requests {_requests(one['requests'])}"
    if one["memory"]:
        free, total = (gib(one["memory"][key]) for key in ("available_bytes", "total_bytes"))
        least = _least_at_start(one["proof"])
        yield f"  memory   {free} of {total} available{least}, {one['restarts'] or 0} restarts"
    yield from _intentions(one)
    yield from _daily(one["daily"])
    for job in one["jobs"]:
        yield f"  job      {_job(job)}"
    for event in one["events"][-3:]:
        yield f"  event    {event.get('at')} {event.get('kind')}: {event.get('text')}"


def _figures(proof: dict[str, Any]) -> Iterator[str]:
    if counted := proof.get("kv_cache"):
        room = f"{counted['tokens']:,} tokens in {gib(counted['size_bytes'])}"
        yield f"  cache    {room}, as the engine counts"
    for text in proof.get("speed", ()):
        yield f"  speed    {text.removeprefix(SPEED)}"


def _daily(look: dict[str, Any]) -> Iterator[str]:
    for found in look.get("problems", ()):
        yield f"  daily    {found['where']}: {found['what']}; fix: {found['fix']}"


def _least_at_start(proof: dict[str, Any]) -> str:
    start = proof.get("start_memory")
    if not start:
        return ""
    return f" (least at its start {gib(start['lowest_bytes'])}, floor {gib(start['floor_bytes'])})"


def _intentions(one: dict[str, Any]) -> Iterator[str]:
    """Yield what people, or a pending reboot, want of this host beside its plan."""
    if one["versions_unknown"]:
        yield f"  unknown  {one['versions_unknown']}"
    if one["reboot_pending"]:
        yield f"  reboot   pending: {one['reboot_pending']}"
    if one["stopped"]:
        yield f"  stopped  {one['stopped']}"
    if one["rolled_back"]:
        back = one["rolled_back"]
        yield f"  back     rolled back from {back['from_pair']} at {back['at']}, by hand"
    for pair in one["ready"]:
        missing = ", ".join(pair["missing"])
        state = f"not ready: {missing}" if missing else "a rollout needs no download and no build"
        yield f"  ready    {pair['model']} with {pair['profile']}: {state}"


def _job(job: dict[str, Any]) -> str:
    progress = job.get("progress") or {}
    share = ""
    if progress.get("total"):
        share = f" {100 * (progress.get('bytes') or 0) / progress['total']:.0f} %"
    why = f" ({job['result']})" if job["state"] == "failed" and job.get("result") else ""
    return f"{job['title']}: {job['state']}{share}{why}"


def _proof(proof: dict[str, Any]) -> str:
    checks = proof.get("checks", ())
    good = sum(1 for check in checks if check.get("ok"))
    text = f"{proof.get('level')} check, {good} of {len(checks)} passed, {_age(proof)}"
    if not proof.get("current"):
        text += f"; no longer current: {proof.get('why')}"
    if proof.get("portable"):
        text += "; PORTABLE MODE"
    if proof.get("stubbed"):
        text += f"; stand-ins: {', '.join(proof['stubbed'])}"
    return text


def _age(proof: dict[str, Any]) -> str:
    """Say how long ago the check ran; hosts write an ISO time."""
    said = str(proof.get("checked_at"))
    try:
        checked = datetime.fromisoformat(said.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return f"at an unknown time ({said})"
    seconds = max(0.0, datetime.now(timezone.utc).timestamp() - checked)
    for unit, size_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size_s:
            count = int(seconds // size_s)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
