"""``spark-deploy status``: each host's releases, check results and differences from the plan."""

from collections.abc import Iterator, Mapping
from typing import Any

import click
from pyinfra.api.host import Host
from spark_contract.documents import to_plain
from spark_contract.release import PREFIX_REUSE
from spark_contract.status import UninstallManifest
from spark_contract.tool import SPEED
from spark_contract.units import MAIN_SERVICE

from spark_deploy.cli.console import Options, print_result, shared_options
from spark_deploy.cli.hosts import Answer, Target, build_plan, query, read_status, select_hosts
from spark_deploy.cli.status_rows import check_age, short_lines
from spark_deploy.cli.up import rollout_text
from spark_deploy.config.errors import SparkError
from spark_deploy.hosts.payload import read_payload
from spark_deploy.hosts.status import (
    ON_REQUEST,
    HostStatus,
    RequestCounts,
    Requests,
    describe_start,
)
from spark_deploy.hosts.uninstall import (
    gigabytes,
    list_resources,
    read_resources,
    uninstall_request,
)
from spark_deploy.lock.resolve import read_lock, required_names
from spark_deploy.plan.jobs import plan_jobs
from spark_deploy.plan.memory import gib
from spark_deploy.plan.types import HostPlan


@click.command
@click.option("--files", is_flag=True, help="List managed files, packages and units, with sizes.")
@click.option(
    "--planned", is_flag=True, help="With --files, list planned files without connecting to hosts."
)
@click.option("-v", "--verbose", is_flag=True, help="Print all details.")
@shared_options(plans=True)
def status(options: Options, files: bool, planned: bool) -> int:
    """Return 1 unless every host serves its planned releases and their checks are current."""
    if files:
        return _planned_files(options) if planned else _managed_files(options)
    if planned:
        raise SparkError.single("--planned", "requires --files", "add --files")
    counts: dict[str, dict[str, RequestCounts]] = {}

    def read(host: Host, target: Target) -> HostStatus | None:
        host_status = read_status(host, target)
        report = host_status.report if host_status else None
        services = report.services if report else {}
        active_services = tuple(name for name, service in services.items() if service.active)
        if active_services:
            counts[target.name] = host.get_fact(Requests, services=active_services)
        return host_status

    hosts = []
    for answer in query(select_hosts(options, must_serve=False), read):
        requests = counts.get(answer.host.name, {})
        summary = {**summarize(answer), "requests": to_plain(requests.get(MAIN_SERVICE))}
        for service in summary.get("services", ()):
            service["requests"] = to_plain(requests.get(service["service"]))
        hosts.append(summary)
    texts = map(status_lines, hosts) if options.verbose else [short_lines(hosts)]
    print_result(options, hosts, texts, separator="\n")
    return 0 if all(host["reachable"] and not host["drift"] for host in hosts) else 1


def _planned_files(options: Options) -> int:
    plans = {host.name: build_plan(host) for host in select_hosts(options)}
    resources = {name: list_resources(plan, read_payload()) for name, plan in plans.items()}
    texts = (
        [name, *(f"  {entry.kind:<10} {entry.name}" for entry in entries)]
        for name, entries in resources.items()
    )
    print_result(options, resources, texts, separator="\n")
    return 0


def _managed_files(options: Options) -> int:
    """Print managed resources on hosts; return 1 if a host did not answer."""

    def read(_host: Host, target: Target) -> UninstallManifest:
        return read_resources(uninstall_request(target.settings))

    answers = query(select_hosts(options, must_serve=False), read)
    data = [{**answer.data(), **(to_plain(answer.value) or {})} for answer in answers]
    print_result(options, data, map(_resource_lines, answers), separator="\n")
    return 0 if all(answer.value is not None for answer in answers) else 1


def _resource_lines(answer: Answer[UninstallManifest]) -> Iterator[str]:
    name, resources = answer.host.name, answer.value
    if resources is None:
        yield f"{name}: {answer.problem}"
        return
    total = gigabytes(sum(item.size_bytes for item in resources.items))
    recorded = f"recorded at {resources.baseline_at}" if resources.baseline_at else "not recorded"
    summary = "no managed resources"
    if resources.items:
        summary = f"{len(resources.items)} resources, {total}"
        summary += f"; state before the first deploy: {recorded}"
    yield f"{name}: {summary}"
    for item in resources.items:
        size = gigabytes(item.size_bytes) if item.size_bytes else ""
        reason = f"  ({item.kept_because})" if item.kept_because else ""
        yield f"  {size:>9}  {item.kind:<13} {item.name}{reason}"


def summarize(answer: Answer[HostStatus]) -> dict[str, Any]:
    host_status = answer.value
    if host_status is None:
        return {**answer.data(), "drift": answer.problem}
    plan, plan_problem = _build_plan(answer.host)
    scheduled = [entry.release for entry in plan.schedule] if plan else []
    planned = host_status.expected_release(plan.release, scheduled).name if plan else None
    drift = host_status.unproven_reason(MAIN_SERVICE, planned) if planned else plan_problem
    services = _services(plan, host_status)
    drifts = {service["service"]: service["drift"] for service in services}
    service_drift = "; ".join(f"{name}: {text}" for name, text in drifts.items() if text)
    accepted = answer.host.settings.expect.unit_overrides
    overrides = host_status.unit_overrides(accepted)
    return {
        **answer.data(),
        "installed": host_status.installed,
        "planned": planned,
        "planned_pair": _release_name(host_status, planned, plan),
        "unreadable": host_status.unreadable,
        "drift": drift
        or service_drift
        or (f"unit files: {', '.join(overrides)}" if overrides else ""),
        "unit_overrides": list(overrides),
        "ready": _readiness(plan, host_status) if plan else [],
        "services": services,
        **host_fields(host_status),
    }


def _build_plan(host: Target) -> tuple[HostPlan | None, str]:
    """Return the plan, or None and the reason."""
    lock = read_lock(host.loaded.lock_path)
    try:
        if required_names(host.settings, host.catalog).missing_in(lock).names:
            return None, "the plan is not locked yet"
        return build_plan(host), ""
    except SparkError as error:
        return None, f"these settings cannot be deployed: {error.problems[0].line}"


def _services(plan: HostPlan | None, host_status: HostStatus) -> list[dict[str, Any]]:
    releases = [service.release for service in plan.services] if plan else []
    planned = {release.service: release.name for release in releases}
    on_host = host_status.report.services if host_status.report else {}
    running = {
        name: service.active
        for name, service in on_host.items()
        if name != MAIN_SERVICE and (service.active or service.enabled or name in planned)
    }
    services = []
    for name in sorted({*planned, *running}):
        release_name = planned.get(name)
        is_on_request = host_status.waits_for_request(name, release_name)
        stopped = ON_REQUEST if is_on_request else host_status.stop_message(name)
        drift = "no longer listed"
        if release_name:
            drift = host_status.unproven_reason(name, release_name)
        services.append({
            "service": name,
            "planned": release_name,
            **_serving(host_status, running.get(name)),
            "stopped": stopped,
            "rollout": _rollout(host_status, name),
            "drift": "" if stopped else drift,
        })  # fmt: skip
    return services


def _serving(host_status: HostStatus, active: str | None) -> dict[str, Any]:
    """Return a service's release, and whether the check result is current."""
    release = host_status.release(active)
    proof = {}
    if release:
        current = {"current": release.unproven is None, "why": release.unproven}
        proof = {**(to_plain(release.proof) or {}), **current, "speed": list(release.speed)}
    return {
        "release": active,
        "model": release.model if release else None,
        "profile": release.profile if release else None,
        "names": list(release.names) if release else [],
        "proof": proof,
        "live": to_plain(host_status.live_check(active) if active else None) or {},
    }


def host_fields(host_status: HostStatus) -> dict[str, Any]:
    """Return the state of the main service and the host, as reported by the host tools."""
    data = to_plain(host_status.report) or {}
    service = host_status.service(MAIN_SERVICE)
    active = service.active if service else None
    release = host_status.release(active)
    rolled_back = None
    if service and (back := service.rolled_back):
        name = _release_name(host_status, back.from_release, None)
        rolled_back = {"from": back.from_release, "from_pair": name, "to": back.to, "at": back.at}
    return {
        **_serving(host_status, active),
        "restarts": release.restarts if release else None,
        "memory": data.get("memory", {}),
        "versions": data.get("versions", {}),
        "versions_unknown": host_status.unknown_versions_message(),
        "reboot_pending": data.get("reboot_pending", ""),
        "stopped": host_status.stop_message(MAIN_SERVICE),
        "rollout": _rollout(host_status, MAIN_SERVICE),
        "rolled_back": rolled_back,
        "jobs": [job for job in data.get("jobs", ()) if job["state"] != "done"],
        "events": data.get("events", {}).get(MAIN_SERVICE, []),
        "daily": data.get("daily") or {},
        "keys": to_plain(host_status.usage()),
    }


def _rollout(host_status: HostStatus, service: str) -> dict[str, Any] | None:
    rollout = host_status.rollout(service)
    return {**to_plain(rollout), "text": rollout_text(host_status, rollout)} if rollout else None


def _release_name(host_status: HostStatus, name: str | None, plan: HostPlan | None) -> str | None:
    """Return the release name, with model and profile if the plan or the host has the release."""
    release = plan if plan and plan.release.name == name else host_status.release(name)
    return f"{release.model} with {release.profile}, {name}" if release else name


def _readiness(plan: HostPlan, host_status: HostStatus) -> list[dict[str, Any]]:
    jobs = host_status.report.jobs if host_status.report else ()
    done = {job.digest for job in jobs if job.state == "done"}
    context = read_payload().image_context
    return [
        {
            "model": entry.model,
            "profile": entry.profile,
            "missing": [
                work.job.title for work in plan_jobs(entry, context) if work.job.digest not in done
            ],
        }
        for entry in plan.ready
    ]


def _row(title: str, text: str) -> str:
    return f"  {title:<8} {text}"


def status_lines(host: Mapping[str, Any]) -> Iterator[str]:
    if not host["reachable"]:
        yield f"{host['host']}: {host['problem']}"
    elif not host["installed"]:
        yield f"{host['host']}: not set up yet"
    else:
        yield f"{host['host']}: {_release_text(host)}"
        drift = host["drift"] or "as planned"
        if host["drift"] and host["planned"]:
            drift += f" (planned: {host['planned_pair']})"
        yield _row("plan", drift)
        if host["rollout"]:
            yield _row("rollout", host["rollout"]["text"].removeprefix("rollout "))
        yield from _details(host)
        for name, usage in host["keys"].items():
            yield _row("key", f"{name}: {usage_text(usage)}")
        for service in host["services"]:
            yield from _service_lines(service)


def _service_lines(service: Mapping[str, Any]) -> Iterator[str]:
    text = service["stopped"] or _release_text(service)
    yield _row("service", f"{service['service']}: {text}")
    if service.get("rollout"):
        yield _row("", service["rollout"]["text"])
    if service["drift"]:
        yield _row("", f"{service['drift']} (planned: {service['planned'] or 'nothing'})")
    elif service["proof"]:
        yield _row("", _proof_text(service["proof"]))
    if service.get("requests"):
        yield _row("", _requests_text(service["requests"]))


def _requests_text(requests: Mapping[str, int]) -> str:
    return f"{requests['running']} running, {requests['waiting']} waiting"


def usage_text(usage: Mapping[str, int]) -> str:
    received, sent = (gigabytes(usage[key]) for key in ("received_bytes", "sent_bytes"))
    return f"{usage['requests']:,} requests, {received} received, {sent} sent"


def _release_text(service: Mapping[str, Any]) -> str:
    if service.get("unreadable"):
        return f"release unknown: {service['unreadable']}"
    if not service["release"]:
        return "serves nothing"
    names = ", ".join(service["names"])
    return f"{service['model']} with {service['profile']} as {names} ({service['release']})"


def _details(host: Mapping[str, Any]) -> Iterator[str]:
    if host["proof"]:
        yield from _proof_lines(host["proof"])
    if live := host["live"]:
        answer = f"answered in {live.get('seconds', 0):.1f} s"
        yield _row("live", answer if live.get("ok") else f"no answer: {live.get('detail')}")
    if host.get("requests"):
        yield _row("requests", _requests_text(host["requests"]))
    if host["memory"]:
        free, total = (gib(host["memory"][key]) for key in ("available_bytes", "total_bytes"))
        at_start = ""
        if start := host["proof"].get("start_memory"):
            lowest, floor = gib(start["lowest_bytes"]), gib(start["floor_bytes"])
            at_start = f" (minimum during startup {lowest}, floor {floor})"
        restarts = host["restarts"] or 0
        yield _row("memory", f"{free} of {total} available{at_start}, {restarts} restarts")
    yield from _notice_lines(host)
    for problem in host["daily"].get("problems", ()):
        yield _row("daily", f"{problem['where']}: {problem['what']}; fix: {problem['fix']}")
    for job in host["jobs"]:
        progress, percent = job.get("progress") or {}, ""
        if progress.get("total"):
            percent = f" {100 * (progress.get('bytes') or 0) / progress['total']:.0f} %"
        reason = f" ({job['result']})" if job["state"] == "failed" and job.get("result") else ""
        yield _row("job", f"{job['title']}: {job['state']}{percent}{reason}")
    for event in host["events"][-3:]:
        yield _row("event", f"{event.get('at')} {event.get('kind')}: {event.get('text')}")


def _notice_lines(host: Mapping[str, Any]) -> Iterator[str]:
    for title, key in (("unknown", "versions_unknown"), ("stopped", "stopped")):
        if host[key]:
            yield _row(title, host[key])
    if host["reboot_pending"]:
        yield _row("reboot", f"pending: {host['reboot_pending']}")
    for path in host["unit_overrides"]:
        text = f"{path} changes a unit; remove the file, or list it in expect.unit_overrides"
        yield _row("units", text)
    if back := host["rolled_back"]:
        yield _row("back", f"rolled back manually from {back['from_pair']} at {back['at']}")
    for entry in host["ready"]:
        state = "ready; a rollout needs no download or build"
        if entry["missing"]:
            state = f"not ready: {', '.join(entry['missing'])}"
        yield _row("ready", f"{entry['model']} with {entry['profile']}: {state}")


def _proof_lines(proof: Mapping[str, Any]) -> Iterator[str]:
    yield _row("proof", _proof_text(proof))
    for check in proof.get("checks", ()):
        if check["name"] == PREFIX_REUSE and check["ok"]:  # the effect of prefix caching
            yield _row("prefix", check["detail"])
        if not check["ok"] and check.get("severity") == "warn":
            yield _row("warned", f"{check['name']}: {check['detail']}")
    if cache := proof.get("kv_cache"):
        size = gib(cache["size_bytes"])
        yield _row("cache", f"{cache['tokens']:,} tokens in {size}, measured by the engine")
    if times_s := proof.get("start_times_s"):
        yield _row("start", describe_start(times_s))
    for text in proof.get("speed", ()):
        yield _row("speed", text.removeprefix(SPEED))


def _proof_text(proof: Mapping[str, Any]) -> str:
    checks = proof.get("checks", ())
    passed = sum(1 for check in checks if check.get("ok"))
    text = f"{proof.get('level')} check, {passed} of {len(checks)} passed, {check_age(proof)}"
    if not proof.get("current"):
        text += f"; no longer current: {proof.get('why')}"
    if proof.get("portable"):
        text += "; PORTABLE MODE"
    if proof.get("stubbed"):
        text += f"; stand-ins: {', '.join(proof['stubbed'])}"
    return text
