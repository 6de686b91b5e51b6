"""Hosts as their owners have them: whatever they look like, they come to serve, and stay theirs.

With RESULTS=write what was seen goes to proofs/results/lab/flavours.json.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import flavour
from lab.flavour import Flavour
from tests.host.belongings import Belongings, changes, look
from tests.labkit import CHECKOUT, SPARE, STATE, Guest, Site, guest_named, lab
from tests.runs import Run

NAME = SPARE[0]
IN_THE_GATE = "awkward"
PROXY_LOG = STATE / "run/proxy.log"
RESULTS = CHECKOUT / "proofs/results/lab/flavours.json"
WHOLE = {"doctor", "first", "second", "owners", "rebooted"}
QUESTION = "What is the capital of France?"


@dataclass
class Theirs:
    """A host of one flavour, from its first boot to what the first deploy made of it."""

    flavour: Flavour
    site: Site
    guest: Guest
    before: Belongings
    doctor_new: str
    doctor_ready: tuple[int, str]
    first: Run
    proxy_log_bytes: int  # of earlier guests, and of what the owner fetched
    seen: dict[str, Any] = field(default_factory=dict)  # by the tests, for the result file

    def asked_of_the_proxy(self) -> list[str]:
        """Return the requests that went through the proxy since the owner handed the host over."""
        log = PROXY_LOG.read_bytes()[self.proxy_log_bytes :].decode(errors="replace")
        return [line for line in log.splitlines() if "Request (file descriptor" in line]

    def belongings(self) -> Belongings:
        return look(self.guest.run, self.flavour.owned_units)


def flavours() -> list[object]:
    """Return every flavour on disk; one of them is part of the gate."""
    return [
        pytest.param(name, marks=[pytest.mark.gate] if name == IN_THE_GATE else [])
        for name in flavour.names()
    ]


def site_of(root: Path, hosts: list[str], of: Flavour) -> Site:
    """Return a repository whose owner chose what hosts of this flavour need."""
    site = Site(root, hosts=hosts)
    site.choose(model="lab-stub", profile="v2")
    (root / "host_vars").mkdir()
    for name in hosts:
        (root / f"host_vars/{name}.yml").write_text(yaml.safe_dump(dict(of.settings)))
    return site


@pytest.fixture(scope="module", params=flavours())
def theirs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Theirs]:
    chosen = flavour.read(request.param)
    lab("up", NAME, "--fresh", "--bootstrap-guest", NAME, "--flavour", chosen.name)
    log_bytes = PROXY_LOG.stat().st_size if PROXY_LOG.exists() else 0
    before = look(
        lambda command: lab("ssh", "--root", NAME, command).rstrip("\n"), chosen.owned_units
    )
    root: Path = tmp_path_factory.mktemp("site")
    site = site_of(root, [NAME], chosen)
    doctor_new = "".join(site.tool("doctor")[1])
    bootstrapped = site.bootstrap(NAME)
    assert bootstrapped.exit_code == 0, bootstrapped.stderr[-4000:]
    doctor_ready = site.tool("doctor")
    first = site.deploy()
    guest = guest_named(NAME)
    theirs = Theirs(chosen, site, guest, before, doctor_new, doctor_ready, first, log_bytes)
    yield theirs
    if os.environ.get("RESULTS") == "write" and theirs.seen.keys() == WHOLE:
        keep(theirs)
    lab("down", NAME)


def keep(theirs: Theirs) -> None:
    """Put what the tests saw of one flavour into the result file; the others' rows stay."""
    run = theirs.guest.run
    row = {
        "flavour": theirs.flavour.name,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "system": run(". /etc/os-release; echo $PRETTY_NAME"),
        "docker": run("docker version --format '{{.Server.Version}}'"),
        **theirs.seen,
    }
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {one["flavour"]: one for one in [*before, row]}
    told = {
        "command": "RESULTS=write pytest tests/host/test_flavours.py",
        "device": "guests of the virtual lab, x86_64, the stub engine",
        "rows": [rows[name] for name in sorted(rows)],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")


def test_doctor_finds_a_healthy_host_before_anything_is_changed(theirs: Theirs) -> None:
    assert "bootstrap" in theirs.doctor_new
    code, said = theirs.doctor_ready
    assert code == 0, said
    warned = sum(line.split()[:1] == ["warning"] for line in said.splitlines())
    theirs.seen["doctor"] = {"exit_code": code, "warnings": warned}


def test_the_first_deploy_serves(theirs: Theirs) -> None:
    assert theirs.first.exit_code == 0, f"{theirs.first.failed}\n{theirs.first.stderr[-6000:]}"
    assert theirs.guest.answers(QUESTION, "Paris")
    theirs.seen["first"] = {"changed": len(theirs.first.changed), "served": True}


def test_the_second_deploy_changes_nothing(theirs: Theirs) -> None:
    second = theirs.site.deploy()
    second.must_have_changed_nothing()
    theirs.seen["second"] = {"changed": len(second.changed)}


def test_what_belongs_to_the_owner_is_as_it_was(theirs: Theirs) -> None:
    found = changes(theirs.before, theirs.belongings())
    assert found == []
    theirs.seen["owners"] = {**theirs.before.counts, "changed": len(found)}


def test_it_serves_again_after_a_reboot_and_the_rest_is_as_it_was(theirs: Theirs) -> None:
    theirs.guest.reboot(seconds=120)
    unit = theirs.guest.wait("systemctl is-active 'spark-serve@*' && echo", seconds=60)
    theirs.guest.wait("systemctl is-active docker")
    assert unit
    theirs.guest.wait(
        "curl -sf -o /dev/null -H \"Authorization: Bearer $(cat /etc/spark/api-key)\" "
        "http://127.0.0.1:8000/v1/models", seconds=120,
    )  # fmt: skip
    assert theirs.guest.answers(QUESTION, "Paris")
    found = changes(theirs.before, theirs.belongings(), rebooted=True)
    assert found == []
    third = theirs.site.deploy()
    third.must_have_changed_nothing()
    theirs.seen["rebooted"] = {
        "served": True, "owners_changed": len(found), "changed": len(third.changed),
    }  # fmt: skip


def test_one_whose_only_way_out_is_a_proxy_got_everything_through_it(theirs: Theirs) -> None:
    if not theirs.flavour.proxied:
        assert theirs.guest.run("curl -s -o /dev/null http://10.77.0.1:8082/; echo $?") == "0"
        return
    for place in ("10.77.0.1:8081", "10.77.0.1:8082", "10.77.0.1:5000", "10.77.0.2:8082"):
        straight = f"curl -s -m 5 --noproxy '*' -o /dev/null http://{place}/; echo $?"
        assert theirs.guest.run(straight) == "7", place  # no connection
    asked = theirs.asked_of_the_proxy()
    for place, what in (
        ("10.77.0.1:8081", "InRelease"), ("10.77.0.1:8081", "archive-key.asc"),
        ("10.77.0.1:8081", ".deb"), ("10.77.0.1:8082", "/resolve/"), ("10.77.0.1:5000", "/blobs/"),
    ):  # fmt: skip
        assert [line for line in asked if place in line and what in line], (place, what)


def test_a_whole_weight_in_anothers_cache_is_copied_and_a_wrong_one_is_fetched(
    theirs: Theirs,
) -> None:
    blobs = "/home/*/.cache/huggingface/hub/*/blobs"
    found = theirs.guest.run(f"sha256sum {blobs}/*[0-9a-f] 2>/dev/null || :")
    kept = {path.rpartition("/")[2]: sum_ for sum_, path in map(str.split, found.splitlines())}
    weights = {named: sum_ == named for named, sum_ in kept.items() if len(named) == 64}
    assert set(weights.values()) == ({True, False} if theirs.flavour.proxied else set())
    asked = "\n".join(theirs.asked_of_the_proxy()) if weights else ""
    sources = theirs.guest.run("sha256sum /srv/spark/sources/*/*.safetensors")
    ours = {line[:64]: line[66:] for line in sources.splitlines()}
    for named, whole in weights.items():
        inodes = theirs.guest.run(f"stat -c %i {blobs}/{named} {ours[named]}").split()
        assert len(set(inodes)) == 2, "linked, though its owner can change it"
        assert (named in asked) is not whole


def test_a_report_tells_what_it_shows_and_nothing_of_its_owner(
    theirs: Theirs, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    code, output = theirs.site.tool("doctor", "--report", "--out", str(file))
    assert code == 0, output
    text = file.read_text()
    report = json.loads(text)["hosts"][0]
    assert report["serving"]["proven"] is True
    assert report["stand_ins"]
    assert {answer["state"] for answer in report["answers"]} == {"open"}
    answers = {answer["id"]: answer["text"] for answer in report["answers"]}
    assert answers["rollout"].startswith("stand-ins; switched: ")
    assert "one_stream_tokens_per_s" in answers["speed"]
    assert re.fullmatch(r"stand-ins; (\d+) of \1 done.*", answers["fetched"]), answers["fetched"]
    assert re.fullmatch(r"stand-ins; least [\d.]+ GiB, floor [\d.]+ GiB", answers["memory-left"])
    assert answers["preflight"].startswith("stand-ins; warned of ")
    mac = theirs.guest.run("cat /sys/class/net/eth0/address").strip()
    key = theirs.guest.run("cat /etc/spark/api-key").strip()
    machine = theirs.guest.run("cat /etc/machine-id").strip()
    for private in (
        NAME, theirs.guest.ip, "10.77.0", mac, key, machine, QUESTION, "Paris", "/home/spark",
        "qdrant", "postgres", "comfyui", "gnome-shell",
    ):  # fmt: skip
        assert private.lower() not in text.lower(), private


def test_hosts_cloned_from_one_disk_a_torn_one_and_one_of_yesterday_are_told_and_taken(
    tmp_path: Path,
) -> None:
    cloned = next(one for one in map(flavour.read, flavour.names()) if one.cloned_host_key)
    lab("up", *SPARE, "--fresh", "--flavour", cloned.name)
    for name, torn in zip(SPARE, (0, 3), strict=True):  # guests of flavours have the other scores
        said = json.dumps({"name": "July 2026", "torn": torn})
        guest_named(name).run(f"echo '{said}' >/usr/lib/labstub/torn-score.json")
    # Guests share the machine's clock: one whose day is another can only be told by `date`.
    late = "#!/bin/sh\nexec /usr/bin/date -d '1 day ago' \"$@\""
    guest_named(SPARE[1]).run(
        f"cat >/usr/local/bin/date <<'E'\n{late}\nE\nchmod +x /usr/local/bin/date"
    )
    site = site_of(tmp_path, [*SPARE], cloned)
    code, said = site.tool("doctor")
    site.choose(expect={"updates": "require"})
    required, refused = site.tool("doctor")
    lab("down", *SPARE)
    assert code == 0, said
    for name in SPARE:
        assert f"warning   SSH host key: is also that of {name}" in said
    assert said.count("minutes behind this machine's") == 1
    assert "1,440 minutes behind" in said
    assert said.count("torn score") == 1
    assert "torn score 3 against July 2026" in said
    assert required != 0, refused
    assert "torn score 3 against July 2026" in refused
