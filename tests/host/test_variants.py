"""Hosts with different histories become servers, and everything of their owners stays unchanged.

RESULTS=write updates proofs/results/lab/variants.json.
"""

import json
import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import variant
from lab.variant import Variant
from tests.host.owned_state import OwnedState, list_changes, read_state
from tests.labkit import CAPITAL, CHECKOUT, SPARE, STATE, Guest, Site, guest_named, lab
from tests.runs import Run

NAME = SPARE[0]
IN_THE_GATE = "awkward"
PROXY_LOG = STATE / "run/proxy.log"
RESULTS = CHECKOUT / "proofs/results/lab/variants.json"
MEASURED = {"doctor", "first", "second", "owners", "rebooted"}


@dataclass
class OwnedHost:
    variant: Variant
    site: Site
    guest: Guest
    before: OwnedState
    doctor_new: str
    doctor_ready: tuple[int, str]
    first: Run
    proxy_log_bytes: int
    measured: dict[str, Any] = field(default_factory=dict)

    def proxy_requests(self):
        log = PROXY_LOG.read_bytes()[self.proxy_log_bytes :].decode(errors="replace")
        return [line for line in log.splitlines() if "Request (file descriptor" in line]

    def owned_state(self):
        return read_state(self.guest.run, self.variant.owned_units)


def variants():
    return [
        pytest.param(name, marks=[pytest.mark.gate] if name == IN_THE_GATE else [])
        for name in variant.names()
    ]


def site_for(root, hosts, variant_):
    site = Site(root, hosts=hosts)
    site.choose(model="lab-stub", profile="v2")
    (root / "host_vars").mkdir()
    for name in hosts:
        (root / f"host_vars/{name}.yml").write_text(yaml.safe_dump(dict(variant_.settings)))
    return site


@pytest.fixture(scope="module", params=variants())
def host(request, tmp_path_factory):
    chosen = variant.read(request.param)
    lab("up", NAME, "--fresh", "--bootstrap-guest", NAME, "--variant", chosen.name)
    log_bytes = PROXY_LOG.stat().st_size if PROXY_LOG.exists() else 0
    before = read_state(
        lambda command: lab("ssh", "--root", NAME, command).rstrip("\n"), chosen.owned_units
    )
    root: Path = tmp_path_factory.mktemp("site")
    site = site_for(root, [NAME], chosen)
    _, doctor_new = site.cli_output("doctor")
    site.bootstrap(NAME).assert_succeeded()
    doctor_ready = site.cli_output("doctor")
    first = site.deploy()
    host = OwnedHost(
        chosen, site, guest_named(NAME), before, doctor_new, doctor_ready, first, log_bytes
    )
    yield host
    if os.environ.get("RESULTS") == "write" and host.measured.keys() == MEASURED:
        write_result(host)
    lab("down", NAME)


def write_result(host):
    run = host.guest.run
    row = {
        "variant": host.variant.name,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "system": run(". /etc/os-release; echo $PRETTY_NAME"),
        "docker": run("docker version --format '{{.Server.Version}}'"),
        **host.measured,
    }
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {entry["variant"]: entry for entry in [*before, row]}
    document = {
        "command": "RESULTS=write pytest tests/host/test_variants.py",
        "device": "guests of the virtual lab, x86_64, the stub engine",
        "rows": [rows[name] for name in sorted(rows)],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def test_doctor_accepts_nonstandard_host_before_any_change(host):
    assert "bootstrap" in host.doctor_new
    code, output = host.doctor_ready
    assert code == 0, output
    warned = sum(line.split()[:1] == ["warning"] for line in output.splitlines())
    host.measured["doctor"] = {"exit_code": code, "warnings": warned}


def test_nonstandard_host_serves_after_first_deploy(host):
    host.first.assert_succeeded()
    assert host.guest.answers()
    host.measured["first"] = {"changed": len(host.first.changed), "served": True}


def test_second_deploy_to_nonstandard_host_changes_nothing(host):
    second = host.site.deploy().assert_unchanged()
    host.measured["second"] = {"changed": len(second.changed)}


def test_deploys_keep_the_owners_files_and_settings(host):
    changes = list_changes(host.before, host.owned_state())
    assert changes == []
    host.measured["owners"] = {**host.before.counts, "changed": len(changes)}


def test_nonstandard_host_serves_after_reboot_and_keeps_the_owners_files(host):
    host.guest.reboot(seconds=120)
    host.guest.wait("systemctl is-active 'spark-serve@*' && echo", seconds=60)
    host.guest.wait("systemctl is-active docker")
    host.guest.wait(
        "curl -sf -o /dev/null -H \"Authorization: Bearer $(cat /etc/spark/api-key)\" "
        "http://127.0.0.1:8000/v1/models", seconds=120,
    )  # fmt: skip
    assert host.guest.answers()
    changes = list_changes(host.before, host.owned_state(), rebooted=True)
    assert changes == []
    third = host.site.deploy().assert_unchanged()
    host.measured["rebooted"] = {
        "served": True, "owners_changed": len(changes), "changed": len(third.changed),
    }  # fmt: skip


def test_proxied_host_downloads_only_through_proxy(host):
    if not host.variant.proxied:
        assert host.guest.run("curl -s -o /dev/null http://10.77.0.1:8082/; echo $?") == "0"
        return
    for place in ("10.77.0.1:8081", "10.77.0.1:8082", "10.77.0.1:5000", "10.77.0.2:8082"):
        straight = f"curl -s -m 5 --noproxy '*' -o /dev/null http://{place}/; echo $?"
        assert host.guest.run(straight) == "7", place
    requests = host.proxy_requests()
    for place, path in (
        ("10.77.0.1:8081", "InRelease"), ("10.77.0.1:8081", "archive-key.asc"),
        ("10.77.0.1:8081", ".deb"), ("10.77.0.1:8082", "/resolve/"), ("10.77.0.1:5000", "/blobs/"),
    ):  # fmt: skip
        assert [line for line in requests if place in line and path in line], (place, path)


def test_deploy_copies_valid_cached_weights_and_downloads_damaged_ones(host):
    blobs = "/home/*/.cache/huggingface/hub/*/blobs"
    weights = {}
    for line in host.guest.run(f"sha256sum {blobs}/*[0-9a-f] 2>/dev/null || :").splitlines():
        digest, path = line.split()
        name = path.rpartition("/")[2]
        if len(name) == 64:
            weights[name] = digest == name
    assert set(weights.values()) == ({True, False} if host.variant.proxied else set())
    requests = "\n".join(host.proxy_requests()) if weights else ""
    sources = host.guest.run("sha256sum /srv/spark/sources/*/*.safetensors")
    copies = {line[:64]: line[66:] for line in sources.splitlines()}
    for name, valid in weights.items():
        inodes = host.guest.run(f"stat -c %i {blobs}/{name} {copies[name]}").split()
        assert len(set(inodes)) == 2, "linked although its owner can change it"
        assert (name in requests) is not valid


def test_report_contains_measurements_but_no_private_data(host, tmp_path):
    file = tmp_path / "report.json"
    code, output = host.site.cli_output("doctor", "--report", "--out", str(file))
    assert code == 0, output
    text = file.read_text()
    report = json.loads(text)["hosts"][0]
    assert report["serving"]["proven"] is True
    assert report["stand_ins"]
    assert {answer["state"] for answer in report["answers"]} == {"open"}
    answers = {answer["id"]: answer["text"] for answer in report["answers"]}
    assert "one_stream_tokens_per_s" in answers["speed"]
    for name in ("rollout", "fetched", "memory-left", "preflight"):
        assert answers[name].startswith("stand-ins; "), answers[name]
    mac = host.guest.run("cat /sys/class/net/eth0/address").strip()
    key = host.guest.run("cat /etc/spark/api-key").strip()
    machine = host.guest.run("cat /etc/machine-id").strip()
    for private in (
        NAME, host.guest.ip, "10.77.0", mac, key, machine, CAPITAL, "Paris", "/home/spark",
        "qdrant", "postgres", "comfyui", "gnome-shell",
    ):  # fmt: skip
        assert private.lower() not in text.lower(), private


def test_doctor_warns_about_cloned_keys_wrong_clock_and_failed_updates(tmp_path):
    cloned = next(read for read in map(variant.read, variant.names()) if read.cloned_host_key)
    lab("up", *SPARE, "--fresh", "--variant", cloned.name)
    for name, torn in zip(SPARE, (0, 3), strict=True):
        score = json.dumps({"name": "July 2026", "torn": torn})
        guest_named(name).run(f"echo '{score}' >/usr/lib/labstub/torn-score.json")
    # Guests share the machine's clock: only `date` can show another day.
    late = "#!/bin/sh\nexec /usr/bin/date -d '1 day ago' \"$@\""
    guest_named(SPARE[1]).run(
        f"cat >/usr/local/bin/date <<'E'\n{late}\nE\nchmod +x /usr/local/bin/date"
    )
    site = site_for(tmp_path, [*SPARE], cloned)
    code, output = site.cli_output("doctor")
    site.choose(expect={"dgx_os": "require"})
    required, refused = site.cli_output("doctor")
    lab("down", *SPARE)
    assert code == 0, output
    for name in SPARE:
        assert f"SSH host key: is the same as that of {name}" in output
    assert output.count("1,440 minutes behind") == 1
    assert output.count("torn score") == 1
    assert required != 0, refused
    assert "torn score" in refused
