"""Two services on one host: each is rolled out, proven, rolled back and stopped by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.host.conftest import Fleet
from tests.labkit import Guest

CAPITAL = "What is the capital of France?"
SECOND = {"model": "lab-stub", "profile": "agent", "port": 8001, "memory_gib": 2,
          "names": ["second"]}  # fmt: skip
BAD = {"engine": {"environment": {"STUB_FAULT": "garbage"}}}


def ask(guest: Guest, port: int, model: str) -> tuple[int, str]:
    body = {"model": model, "messages": [{"role": "user", "content": CAPITAL}], "max_tokens": 96}
    status, answer = guest.call("POST", "/v1/chat/completions", body, port=port)
    return status, str(answer)


def both_answer(guest: Guest) -> bool:
    said = [ask(guest, 8000, "lab-model"), ask(guest, 8001, "second")]
    return all(status == 200 and "Paris" in text for status, text in said)


def listed(guest: Guest) -> list[str]:
    status, told = guest.call("GET", "/v1/models")
    assert status == 200
    return [one["id"] for one in told["data"]]


def containers(guest: Guest) -> dict[str, str]:
    """Return the id of each service's container, by docker's word."""
    out = guest.run("docker ps --format '{{.Label \"spark.service\"}} {{.ID}}'")
    return dict(line.split() for line in out.splitlines())


@pytest.fixture(scope="module")
def guest(fleet: Fleet) -> Iterator[Guest]:
    yield fleet.guests[0]
    fleet.settle()


def test_a_second_service_is_deployed_beside_the_first_and_a_second_run_changes_nothing(
    fleet: Fleet, guest: Guest
) -> None:
    first = fleet.settle(guest, services={"second": SECOND})
    assert "Serve | Start new services" in first.changed
    again = fleet.site.deploy("--limit", guest.name)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    assert set(containers(guest)) == {"main", "second"}
    assert len(guest.boots()) == 2
    assert both_answer(guest)
    # The gateway of the main service knows all by name, that of another its own engine alone.
    assert listed(guest) == ["lab-model", "second"]
    status, said = ask(guest, 8000, "second")
    assert (status, "Paris" in said) == (200, True)
    status, said = ask(guest, 8000, "nobody")
    assert (status, "model_not_found" in said) == (404, True)
    assert ask(guest, 8001, "lab-model")[0] == 404
    seen = fleet.site.look("status", "--limit", guest.name, "--json")
    [told] = json.loads(seen.stdout)
    assert seen.returncode == 0, seen.stdout
    assert [one["service"] for one in told["services"]] == ["second"]
    assert told["services"][0]["proof"]["current"]
    how = fleet.site.look("connect", "--limit", guest.name, "--service", "second").stdout
    assert ":127.0.0.1:8001 " in how


def test_a_change_of_one_service_leaves_the_engine_of_the_other_alone(
    fleet: Fleet, guest: Guest
) -> None:
    fleet.settle(guest, services={"second": SECOND})
    before = containers(guest)
    fleet.settle(guest, services={"second": {**SECOND, "profile": "v2"}})
    after = containers(guest)
    assert after["main"] == before["main"]
    assert after["second"] != before["second"]


def test_a_bad_second_service_goes_back_by_itself_while_the_first_serves_on(
    fleet: Fleet, guest: Guest
) -> None:
    fleet.settle(guest, services={"second": SECOND})
    before = containers(guest)
    fleet.site.choose(services={"second": {**SECOND, **BAD}})
    failed = fleet.site.deploy("--limit", guest.name)
    assert failed.exit_code != 0
    assert containers(guest)["main"] == before["main"]
    assert both_answer(guest)


def test_after_a_reboot_both_serve(fleet: Fleet, guest: Guest) -> None:
    fleet.settle(guest, services={"second": SECOND})
    guest.reboot()
    guest.wait("test $(systemctl is-active 'spark-serve@*' | grep -cx active) = 2", seconds=120)
    assert both_answer(guest)
    again = fleet.site.deploy("--limit", guest.name)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]


def test_stop_and_start_are_for_one_service_or_for_all(fleet: Fleet, guest: Guest) -> None:
    fleet.settle(guest, services={"second": SECOND})
    assert fleet.site.look("stop", "--limit", guest.name, "--service", "second").returncode == 0
    assert set(containers(guest)) == {"main"}
    assert ask(guest, 8000, "lab-model")[0] == 200
    assert ask(guest, 8001, "second")[0] == ask(guest, 8000, "second")[0] == 503
    assert listed(guest) == ["lab-model"]
    assert fleet.site.look("start", "--limit", guest.name).returncode == 0
    assert both_answer(guest)


def test_a_service_that_is_not_listed_any_more_is_ended_and_its_things_go_with_a_prune(
    fleet: Fleet, guest: Guest
) -> None:
    fleet.settle(guest, services={"second": SECOND})
    release = next(unit for unit in guest.boots() if "@second-" in unit)
    fleet.site.choices.pop("services")
    fleet.site.choose()
    told = fleet.site.deploy("--limit", guest.name, dry=True)
    assert any("Stop services" in one for one in told.predicted), told.predicted
    ended = fleet.settle(guest)
    assert any("Stop services" in one for one in ended.changed)
    assert set(containers(guest)) == {"main"}
    assert release not in guest.boots()
    assert guest.run("systemctl is-active spark-gateway@second", check=False) != "active"
    assert ask(guest, 8000, "lab-model")[0] == 200
    again = fleet.site.deploy("--limit", guest.name)
    assert (again.exit_code, again.changed) == (0, []), again.stderr[-3000:]
    pruned = fleet.site.deploy("--limit", guest.name, dry=True, deploy="deploys/prune.py")
    name = release.removeprefix("spark-serve@").removesuffix(".service")
    assert f"release {name}" in pruned.stderr
