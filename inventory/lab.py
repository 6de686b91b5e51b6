"""The virtual lab's guests, with settings from lab.json, which `python -m lab up N` writes.

Deploys contain no code for the lab. Other settings are in group_vars/lab.yml, as for any group.
"""

import hashlib as _hashlib
import json as _json
import os as _os
import pathlib as _pathlib
import sys as _sys

_sys.path.insert(0, str(_pathlib.Path(__file__).resolve().parent.parent))

from spark_deploy.config.errors import SettingsError as _SettingsError
from spark_deploy.inventory import group_from as _group_from

_state = _pathlib.Path(_os.environ.get("SPARK_LAB_DIR", "/var/lib/spark-lab")) / "lab.json"
try:
    _lab = _json.loads(_state.read_text(encoding="utf-8"))
except (OSError, ValueError) as _error:
    raise _SettingsError.single(
        str(_state),
        f"the lab's state cannot be read ({_error})",
        "start the lab: run `make lab-up`",
    ) from None


def _image(_name: str) -> str:
    """Return the reference of an image in the lab's registry, even if it is not built yet."""
    _entry = _lab["images"].get(_name, {})
    _repository = _entry.get("repository", f"{_lab['registry']}/lab/{_name}")
    return f"{_repository}:{_entry.get('tag', '1')}"


# Each content of the hub has a separate lock file, so rebuilt models get another one.
_served = _json.dumps({_name: _entry["main"] for _name, _entry in _lab["hub"]["repos"].items()})
_hub_version = _hashlib.sha256(_served.encode()).hexdigest()[:8]

_repositories = {
    _entry["name"]: {
        _key: _entry[_key] for _key in ("url", "suite", "components", "key_url", "key_sha256")
    }
    for _entry in _lab["apt"]
    if not _entry["preconfigured"]
}

lab = _group_from(
    "lab",
    hosts=[_guest["name"] for _guest in _lab["guests"]],
    file=__file__,
    generated={
        "lock_file": f"inventory/lab-{_hub_version}.lock.yml",
        "hub": {"endpoint": _lab["hub"]["endpoint"]},
        "docker": {"packages": _lab.get("docker_packages", ["docker.io"])},
        "registries": {"insecure": [_lab["registry"]]},
        "repositories": _repositories,
        "images": {
            "engine": _image("vllm-cpu"),
            "stub_engine": _image("stub-engine"),
            "gpu_check": _image("cuda-check"),
        },
        "expect": {
            "arch": _lab["os"]["arch"],
            "os": f"{_lab['os']['os_id']} {_lab['os']['os_version']}",
        },
        "ssh": {
            "user": _lab["ssh"]["user"],
            "key_file": _lab["ssh"]["key"],
            "known_hosts_file": _lab["ssh"]["known_hosts"],
        },
    },
    host_data={
        _guest["name"]: {"ssh_hostname": _guest["ip"], "ssh_port": _guest["port"]}
        for _guest in _lab["guests"]
    },
)
