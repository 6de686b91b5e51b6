"""A host's first deploy fails: no server is left, and the host stays usable.

Each test continues from the previous test.
"""

import re
from pathlib import Path

import pytest

from tests.faults.bad_releases import DEPLOYED
from tests.faults.bench import SPARK_HOST
from tests.host.conftest import USUAL
from tests.labkit import SPARE, Guest, Site, guest_named, info, lab
from tests.runs import Run

NAME = SPARE[0]
STARTED = r"\(APIServer pid=\d+\) INFO .* Application startup complete\."
LEFTOVERS = (
    "systemctl list-units --plain --no-legend --state=active,activating 'spark-*.service'",
    "systemctl list-jobs --no-legend",
    "ls /etc/systemd/system/*.wants | grep ^spark- | grep -v daily.timer || :",
    "docker ps -aq",
    "ss -Hltn 'sport = :8000'",
)


INTERRUPT_INSTALLATION = """
set -e; cd /tmp; apt-get -q update; apt-get -q download runc containerd
dpkg --unpack runc_*.deb containerd_*.deb
dpkg -s runc >/var/lib/dpkg/updates/0000
rm /var/lib/dpkg/info/containerd.list /var/lib/dpkg/info/containerd.md5sums
sed -i '/^Package: containerd$/,/^$/ s/^Status:.*/Status: install reinstreq half-installed/' \
  /var/lib/dpkg/status
"""


class FirstDeploy:
    def __init__(self, root):
        lab("up", NAME, "--fresh", "--engine", "stub")
        self.guest: Guest = guest_named(NAME)
        self.before = self.guest.run("ls -d /etc/spark /var/lib/spark 2>/dev/null || :")
        self.guest.run(INTERRUPT_INSTALLATION)
        self.interrupted = self.guest.run("dpkg --audit")
        self.site = Site(root, hosts=[NAME])
        self.site.choose(**USUAL, **(DEPLOYED["garbage answers"].choices or {}))
        self.failed: Run = self.site.deploy()
        named = re.search(r"rollout of (main-[0-9a-f]{12}): ", self.failed.stderr)
        assert named, self.failed.stderr[-6000:]
        self.candidate = named[1]

    def assert_nothing_left(self):
        for command in LEFTOVERS:
            assert self.guest.run(command) == "", command


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    new_host = FirstDeploy(tmp_path_factory.mktemp("site"))
    assert new_host.before == ""
    yield new_host
    lab("down", NAME)


def wait_for_candidate_start(process):
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        started = re.search(r"rollout of (main-[0-9a-f]{12}): start: ", line)
        if started:
            return started[1]
    pytest.fail(f"no candidate was started:\n{''.join(lines)[-4000:]}")


def test_first_deploy_finishes_an_interrupted_package_installation(first):
    assert {"containerd", "runc"} <= set(first.interrupted.split())
    assert first.guest.run("dpkg --audit") == ""
    assert first.guest.run("docker version --format '{{.Server.Os}}'").strip() == "linux"


def test_failed_first_deploy_reports_the_failed_check_and_the_engine_log(first):
    run = first.failed
    assert run.exit_code != 0
    assert f"{first.candidate}: failed-no-previous in phase start: " in run.stderr
    assert "ent fjord" in run.stderr
    assert re.search(f"{first.guest.name} serves nothing; .*rejected: wrong answer to", run.stderr)
    assert not re.search(STARTED, run.stderr), run.stderr[-4000:]
    engine_log = re.search(r"engine log: (\S+)", run.stderr)
    assert engine_log
    assert re.search(STARTED, Path(engine_log[1]).read_text())


def test_failed_first_release_is_stopped_disabled_and_never_rolled_back_to(first):
    first.assert_nothing_left()
    service = first.guest.json(f"{SPARK_HOST} status")["services"]["main"]
    assert (service["known_good"], service["active"]) == (None, None)
    assert first.guest.proof(first.candidate)["ok"] is False
    assert first.site.deploy(deploy="deploys/rollback.py").exit_code != 0
    code, output = first.site.cli_output("start")
    assert code == 1, output
    first.assert_nothing_left()


def test_failed_first_deploy_leaves_a_host_that_can_deploy_again(first):
    guest = first.guest
    image = info()["images"]["cuda-check"]
    name = f"{image['repository']}@{image['digest']}"
    assert guest.run(f"docker run --rm --runtime=nvidia {name} nvidia-smi -L").startswith("GPU 0")
    status = first.site.cli("status", "-v")
    assert status.returncode == 1
    assert first.candidate in status.stdout
    assert f"{NAME}: a deploy would proceed" in first.site.cli("doctor").stdout


def test_reboot_does_not_start_failed_first_release(first):
    first.guest.reboot()

    first.guest.wait_until_booted()
    first.assert_nothing_left()
    assert first.guest.run("journalctl -b -o cat -u 'spark-serve@*'") == ""


def test_power_cut_while_first_release_loads_leaves_no_server(first):
    first.site.choose(engine={"environment": {"STUB_LOAD_S": "60"}})
    process = first.site.start()
    release = wait_for_candidate_start(process)

    lab("break", "kill-guest", NAME)
    process.terminate()
    process.wait(timeout=60)
    lab("up", NAME)

    first.guest.wait_until_booted()
    first.assert_nothing_left()
    assert first.guest.json(f"{SPARK_HOST} switch-poll {release}")["state"] == "interrupted"


def test_deploy_with_corrected_settings_serves_and_redeploy_changes_nothing(first):
    guest = first.guest
    first.site.choices.clear()
    first.site.choose(**USUAL)

    run = first.site.deploy().assert_succeeded()
    assert run.changed == ["Serve | Install units and release",
                           "Serve | Start new services"]  # fmt: skip
    serving = guest.release()
    assert serving != first.candidate
    assert guest.boots() == guest.serving()
    assert guest.answers("What is 7823 * 4519?", "35352137")
    proof = guest.proof()
    assert (proof["ok"], proof["level"]) == (True, "full")
    assert proof["invocation_id"] == guest.invocation()
    good = guest.json("cat /var/lib/spark/good/main.json")
    assert (good["release"], good["previous"]) == (serving, [])
    first.site.deploy().assert_unchanged()
