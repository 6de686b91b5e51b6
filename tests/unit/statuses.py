"""Complete status documents from the few keys that matter to a test."""

from typing import Any

from spark_contract.documents import read
from spark_contract.status import Status

from spark_deploy.hosts.status import HostStatus

STATUS: dict[str, Any] = {
    "schema_version": 2, "releases": [], "services": {}, "jobs": [],
    "memory": {"total_bytes": 0, "available_bytes": 0}, "versions": {}, "versions_unknown": [],
    "reboot_pending": "", "live": None, "events": {},
}  # fmt: skip
_PARTS: dict[str, dict[str, Any]] = {
    "releases": {"name": "", "model": "", "profile": "", "names": [], "active": "active",
                 "restarts": 0, "proof": {}, "unproven": None, "speed": []},
    "jobs": {"digest": "", "title": "", "kind": "fetch", "state": "done", "result": "",
             "exit_code": None, "elapsed_s": None, "progress": None, "last_line": None,
             "log_tail": []},
}  # fmt: skip
SERVICE: dict[str, Any] = {
    "known_good": None, "enabled": [], "active": None, "stopped_by_hand": None,
    "rolled_back": None, "traffic_open": False, "gateway": {},
}  # fmt: skip
_PROOF: dict[str, Any] = {
    "schema_version": 1, "release": "", "digest": "", "invocation_id": "", "level": "full",
    "ok": True, "checked_at": "2020-01-01T00:00:00Z", "checks": [], "versions": {}, "engine": {},
    "portable": False, "stubbed": [], "last_full": None, "bench": None,
}  # fmt: skip
_CHECK = {"name": "", "ok": True, "detail": "", "seconds": 0.1}
_EVENT = {"at": "", "release": "", "kind": "", "text": ""}
_GATEWAY = {"active": "inactive", "enabled": True, "key_problem": None, "difference": None}
_LIVE = {"ok": False, "release": "", "seconds": 0, "detail": ""}
_PROGRESS = dict.fromkeys(("phase", "bytes", "total", "rate_bytes_per_s", "eta_s"))


def host_status(fields: dict[str, Any]) -> HostStatus:
    if not fields:
        return HostStatus(None)
    data = {**STATUS, **fields}
    for name, part in _PARTS.items():
        data[name] = [{**part, **item} for item in data[name]]
    data["services"] = {name: _service(fields) for name, fields in data["services"].items()}
    for release in data["releases"]:
        if release["proof"] is not None:
            release["proof"] = proof = {**_PROOF, **release["proof"]}
            proof["checks"] = [{**_CHECK, **check} for check in proof["checks"]]
    data["events"] = {
        name: [{**_EVENT, **event} for event in events] for name, events in data["events"].items()
    }
    for job in data["jobs"]:
        job["progress"] = job["progress"] and {**_PROGRESS, **job["progress"]}
    data["live"] = data["live"] and {**_LIVE, **data["live"]}
    return HostStatus(read(Status, data))


def _service(fields: dict[str, Any]) -> dict[str, Any]:
    service = {**SERVICE, **fields}
    return {**service, "gateway": {**_GATEWAY, **service["gateway"]}}
