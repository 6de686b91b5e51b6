"""A model with an n-gram table: planned for Qwen3.8-Flash-Next, served by the stub engine."""

FLASH = {"model": "lab-flash", "profile": "flash-two"}


def option(argv, name):
    return argv[argv.index(name) + 1]


def test_deploy_switches_from_v2_to_flash_next_and_rolls_back(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    only, before = ("--limit", guest.name), guest.release()

    fleet.site.choose(**FLASH)
    done = fleet.site.cli("up", "-y", *only)
    assert done.returncode == 0, done.stderr

    after = guest.release()
    assert after != before
    assert option(guest.argv(), "--engram-config") == '{"cpu_offload":false}'
    assert "--enable-prefix-caching" not in guest.argv()
    assert guest.boots() == guest.serving()
    assert guest.answers()
    fleet.site.deploy(*only).assert_unchanged()

    fleet.site.deploy(*only, deploy="deploys/rollback.py").assert_succeeded()

    assert guest.release() == before
    assert "--engram-config" not in guest.argv()
    assert guest.answers()


def test_failed_flash_next_release_is_rolled_back_to_v2(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    only, before = ("--limit", guest.name), guest.release()

    fleet.site.choose(**FLASH, engine={"environment": {"STUB_FAULT": "garbage"}})
    failed = fleet.site.deploy(*only)

    assert failed.exit_code != 0
    assert guest.release() == before
    assert guest.answers()


def test_engine_runs_on_the_configured_cpus(fleet):
    fleet.settle()
    guest = fleet.guests[0]

    fleet.site.choose(**FLASH, engine={"cpuset_cpus": "0"})
    fleet.site.deploy("--limit", guest.name).assert_succeeded()

    assert guest.container()["HostConfig"]["CpusetCpus"] == "0"
    assert guest.answers()
