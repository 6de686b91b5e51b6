import json

import pytest

SECOND = {"model": "lab-stub", "profile": "agent", "port": 8001, "memory_gib": 2,
          "names": ["second"]}  # fmt: skip
BAD = {"engine": {"environment": {"STUB_FAULT": "garbage"}}}


def status_of(guest, port, model):
    return guest.ask(model=model, port=port)[0]


def both_answer(guest):
    answers = [guest.ask(model="lab-model"), guest.ask(model="second", port=8001)]
    return all(status == 200 and "Paris" in str(body) for status, body in answers)


def containers(guest):
    out = guest.run("docker ps --format '{{.Label \"spark.service\"}} {{.ID}}'")
    return dict(line.split() for line in out.splitlines())


@pytest.fixture(scope="module")
def guest(fleet):
    yield fleet.guests[0]
    fleet.settle()


def test_deploy_adds_second_service_and_second_run_changes_nothing(fleet, guest):
    first = fleet.settle(guest, services={"second": SECOND})
    assert "Serve | Start new services" in first.changed
    fleet.site.deploy("--limit", guest.name).assert_unchanged()
    assert set(containers(guest)) == {"main", "second"}
    assert len(guest.boots()) == 2
    assert both_answer(guest)
    assert guest.names() == ["lab-model", "second"]
    assert status_of(guest, 8000, "second") == 200
    assert status_of(guest, 8000, "unknown") == status_of(guest, 8001, "lab-model") == 404
    status = fleet.site.cli("status", "--limit", guest.name, "--json")
    [status_json] = json.loads(status.stdout)
    assert status.returncode == 0, status.stdout
    assert [service["service"] for service in status_json["services"]] == ["second"]
    assert status_json["services"][0]["proof"]["current"]


def test_rollout_of_one_service_does_not_restart_the_other(fleet, guest):
    fleet.settle(guest, services={"second": SECOND})
    before = containers(guest)
    fleet.settle(guest, services={"second": {**SECOND, "profile": "v2"}})
    after = containers(guest)
    assert after["main"] == before["main"]
    assert after["second"] != before["second"]


def test_faulty_release_of_second_service_rolls_back_while_first_serves(fleet, guest):
    fleet.settle(guest, services={"second": SECOND})
    before = containers(guest)
    fleet.site.choose(services={"second": {**SECOND, **BAD}})
    assert fleet.site.deploy("--limit", guest.name).exit_code != 0
    assert containers(guest)["main"] == before["main"]
    assert both_answer(guest)


def test_both_services_serve_after_reboot(fleet, guest):
    fleet.settle(guest, services={"second": SECOND})
    guest.reboot()
    guest.wait("test $(systemctl is-active 'spark-serve@*' | grep -cx active) = 2", seconds=120)
    assert both_answer(guest)
    fleet.site.deploy("--limit", guest.name).assert_unchanged()


def test_stop_and_start_affect_one_named_service_or_all(fleet, guest):
    fleet.settle(guest, services={"second": SECOND})
    assert fleet.site.cli("stop", "--limit", guest.name, "--service", "second").returncode == 0
    assert set(containers(guest)) == {"main"}
    assert status_of(guest, 8000, "lab-model") == 200
    assert status_of(guest, 8001, "second") == status_of(guest, 8000, "second") == 503
    assert guest.names() == ["lab-model"]
    assert fleet.site.cli("start", "--limit", guest.name).returncode == 0
    assert both_answer(guest)


def test_service_removed_from_settings_is_stopped_and_pruned(fleet, guest):
    fleet.settle(guest, services={"second": SECOND})
    release = next(unit for unit in guest.boots() if "@second-" in unit)
    fleet.site.reset("services")
    dry = fleet.site.deploy("--limit", guest.name, dry=True)
    assert any("Stop unlisted services" in name for name in dry.predicted), dry.predicted
    stopped = fleet.settle(guest)
    assert any("Stop unlisted services" in name for name in stopped.changed)
    assert set(containers(guest)) == {"main"}
    assert release not in guest.boots()
    assert guest.run("systemctl is-active spark-gateway@second", check=False) != "active"
    assert status_of(guest, 8000, "lab-model") == 200
    fleet.site.deploy("--limit", guest.name).assert_unchanged()
    pruned = fleet.site.deploy("--limit", guest.name, dry=True, deploy="deploys/prune.py")
    name = release.removeprefix("spark-serve@").removesuffix(".service")
    assert f"release {name}" in pruned.stderr
