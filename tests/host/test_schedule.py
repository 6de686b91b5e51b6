import pytest

from tests.host.gateway_host import NAME

DAY = {"model": "lab-stub", "profile": "v2"}
NIGHT = {"model": "lab-stub", "profile": "v2-tq"}
TIMERS = "systemctl list-timers --all --no-legend 'spark-hours@*' | wc -l"


@pytest.fixture
def unschedule_afterwards(gateway):
    yield
    gateway.site.cli_output("start", NAME)
    gateway.site.reset("schedule", "keep_ready")
    gateway.deploy().assert_succeeded()


@pytest.mark.usefixtures("unschedule_afterwards")
def test_host_switches_models_at_the_scheduled_time(gateway):
    guest, site = gateway.guest, gateway.site
    day = guest.release()
    soon = guest.run("date -d '+5 minutes' +%H:%M").strip()
    site.choose(keep_ready=[NIGHT], schedule=[{"at": "03:00", **DAY}, {"at": soon, **NIGHT}])
    gateway.deploy().assert_succeeded()
    assert guest.release() == day
    assert guest.run(TIMERS).strip() == "2"
    site.deploy().assert_unchanged()

    guest.wait("! systemctl is-active -q 'spark-serve@'" + day, seconds=420)
    guest.wait("systemctl is-active 'spark-serve@*' | grep -qx active", seconds=120)
    guest.wait("! systemctl list-units --state=activating 'spark-switch@*' | grep -q spark-switch",
               seconds=120)  # fmt: skip
    night = guest.release()
    assert night != day
    assert guest.answers()
    assert guest.status()["services"]["main"]["known_good"] == night

    site.deploy().assert_unchanged()
    assert guest.release() == night
    code, output = site.cli_output("status", "-v", NAME)
    assert (code, "as planned" in output) == (0, True), output

    site.reset("schedule")
    gateway.deploy().assert_succeeded()
    assert guest.release() == day
    assert guest.run(TIMERS).strip() == "0"
    assert guest.run("ls /etc/systemd/system | grep -c spark-hours || true").strip() == "0"
    site.deploy().assert_unchanged()


@pytest.mark.usefixtures("unschedule_afterwards")
def test_deploy_rejects_schedule_time_that_systemd_rejects(gateway):
    gateway.site.choose(keep_ready=[NIGHT], schedule=[{"at": "25:99", **DAY}])
    run = gateway.deploy()
    assert run.exit_code != 0
    assert "25:99" in run.stderr
    assert gateway.guest.run(TIMERS).strip() == "0"


@pytest.mark.usefixtures("unschedule_afterwards")
def test_temporary_stop_ends_on_time_even_after_reboot(gateway):
    guest = gateway.guest
    release = guest.release()
    code, output = gateway.site.cli_output("stop", NAME, "--for", "2m")
    assert code == 0, output
    assert guest.serving() == []
    guest.reboot()
    assert guest.serving() == []
    guest.wait("systemctl is-active 'spark-serve@*' | grep -qx active", seconds=300)
    assert guest.release() == release
    assert guest.answers()
    guest.wait("! systemctl is-enabled -q spark-return@main.timer", seconds=30)
    guest.wait("! systemctl is-active -q spark-return@main.timer", seconds=30)
    gateway.site.deploy().assert_unchanged()
