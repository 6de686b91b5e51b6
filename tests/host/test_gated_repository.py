import base64
import json
import shutil
import subprocess
from dataclasses import dataclass

import pytest
import yaml

from lab.paths import HOST_IP, HUB_PORT
from tests.labkit import CHECKOUT, SPARE, STATE, Guest, Site, guest_named, lab, pythonpath

NAME = SPARE[0]
CANARY = "hf_labcanary7d1e93c0b5"
HUB = f"http://{HOST_IP}:{HUB_PORT}"
REPOSITORY = "lab/gated-int4"
TOKENS = "find /var/lib/spark /etc/spark /run -xdev -name hub-token"
JOB = "systemctl is-active -q 'spark-job@*.service'"
# Searches the arguments of all processes in a loop; the pattern does not match itself.
WATCH = (
    "rm -f /run/argv-seen; (while [ ! -e /run/argv-stop ]; do "
    "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' "
    f"| grep -a '[{CANARY[0]}]{CANARY[1:]}' >> /run/argv-seen; sleep 0.2; "
    "done) >/dev/null 2>&1 &"
)


@dataclass
class Gated:
    site: Site
    guest: Guest

    def deploy(self, *more, login=None):
        return self.site.deploy(*more, env=self.environment(login))

    def environment(self, login=None):
        env = {**pythonpath(self.site.checkout), "LAB_HUB": CANARY}
        return env | ({"HF_TOKEN": login, "HF_ENDPOINT": HUB} if login else {})

    def choose(self, **settings):
        self.site.choices.clear()
        self.site.choose(model="lab-gated", profile="v2", **settings)

    def remove_model(self):
        self.guest.run(
            "systemctl stop 'spark-serve@*' 'spark-watch@*'; rm -rf /srv/spark/sources/lab--gated*"
        )

    def cli(self, *arguments):
        result = self.site.cli(*arguments, env=self.environment())
        return result.stdout + result.stderr


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    root = tmp_path_factory.mktemp("gated")
    checkout = root / "checkout"
    checkout.mkdir()
    copy = (
        "git ls-files -z --cached --others --exclude-standard | "
        f"tar cf - --null -T - | tar xf - -C {checkout}"
    )
    subprocess.run(["bash", "-euo", "pipefail", "-c", copy], cwd=CHECKOUT, check=True)
    model = yaml.safe_load((checkout / "catalog/models/lab-stub.yml").read_text())
    model["sources"] = {"base": REPOSITORY}
    (checkout / "catalog/models/lab-gated.yml").write_text(yaml.safe_dump(model))
    hub = STATE / "hub"
    shutil.rmtree(hub / REPOSITORY, ignore_errors=True)
    shutil.copytree(hub / "lab/tiny-int4", hub / REPOSITORY)
    (hub / REPOSITORY / "token").write_text(CANARY)
    lab("up", NAME, "--fresh", "--engine", "stub")
    site = Site(root / "site", hosts=[NAME], checkout=checkout)
    site.choose(model="lab-gated", profile="v2")
    yield Gated(site, guest_named(NAME))
    shutil.rmtree(hub / REPOSITORY, ignore_errors=True)


def test_gated_model_is_rejected_without_token_and_served_with_token(gated):
    refused = gated.deploy()
    assert refused.exit_code != 0
    assert "hf auth login" in refused.stderr

    gated.site.choose(hub={"token": {"env": "LAB_HUB"}})
    gated.guest.run(f"rm -f /run/argv-stop; {WATCH}")
    run = gated.deploy("-vvv")
    gated.guest.run("touch /run/argv-stop")
    assert run.exit_code == 0, run.stderr[-4000:]
    assert gated.guest.run(TOKENS) == ""
    assert gated.guest.run("cat /run/argv-seen", check=False) == ""
    assert_token_absent(run.stderr + json.dumps(run.document))
    assert_fetched(gated)

    gated.deploy().assert_unchanged()


def assert_fetched(gated):
    checkout = gated.guest.run("ls -d /srv/spark/sources/lab--gated-int4*")
    assert gated.guest.json(f"cat {checkout.splitlines()[0]}/receipt.json")


def assert_token_absent(text):
    assert CANARY not in text
    for cut in range(3):
        inside = base64.b64encode(CANARY[cut:].encode()).decode().rstrip("=")[:-2]
        assert inside not in text


def test_hub_token_never_appears_on_the_host(gated):
    guest = gated.guest
    # Send the pattern as base64, because sudo writes every command line to the journal.
    pattern = f"/dev/shm/{NAME}-pattern"
    guest.run(f"echo {base64.b64encode(CANARY.encode()).decode()} | base64 -d > {pattern}")
    paths = guest.run(
        f"grep -rlFs -f {pattern} /etc /run /var/lib/spark /var/log /usr/local/lib/spark /srv/spark"
        "; true"
    )
    guest.run(f"rm {pattern}")
    assert paths == ""
    for words in ("journalctl --no-pager -o export", "systemctl show 'spark-job@*'",
                  "systemctl cat 'spark-job@*'", "docker inspect $(docker ps -aq)"):  # fmt: skip
        assert CANARY not in guest.run(words), words


def test_hub_token_never_appears_on_the_controller(gated):
    for words in (("plan", "--json"), ("plan",), ("status", "--json"),
                  ("status", "--files", "--json"), ("connect", "--json")):  # fmt: skip
        output = gated.cli(*words)
        assert_token_absent(output)
        assert NAME in output or words[0] == "plan", output
    for path in gated.site.root.rglob("*"):
        if path.is_file():
            assert_token_absent(path.read_text(errors="replace"))


def test_hub_login_stays_on_host_until_download_ends_even_after_reboot(gated):
    gated.choose(downloads={"rate_limit_mib_per_s": 0.4})
    gated.remove_model()
    deploy = gated.site.start(env=gated.environment(CANARY))
    try:
        gated.guest.wait(f"{JOB} || {TOKENS} | grep .", seconds=120)
        paths = gated.guest.wait(f"{TOKENS} | grep .", seconds=20)
    finally:
        deploy.kill()
        printed = deploy.communicate()[0]
    assert_token_absent(printed)
    [token] = paths.splitlines()
    assert gated.guest.run(f"stat -c '%a %U:%G' {token}; cat {token}") == f"600 root:root\n{CANARY}"
    gated.guest.reboot(seconds=180)
    assert gated.guest.run(TOKENS) == token
    gated.guest.wait("ls /srv/spark/sources/lab--gated-int4*/receipt.json", seconds=180)
    gated.guest.wait(f"! {TOKENS} | grep .", seconds=20)

    gated.deploy(login=CANARY).assert_succeeded()
    gated.deploy(login=CANARY).assert_unchanged()
    assert gated.guest.run(TOKENS) == ""


def test_rejected_hub_login_fails_the_download_and_is_removed(gated):
    gated.choose()
    gated.remove_model()
    refused = gated.deploy(login="hf_other")
    assert refused.exit_code != 0
    assert "hf auth login" in refused.stderr
    gated.guest.wait(f"! {TOKENS} | grep .", seconds=20)
    gated.deploy(login=CANARY).assert_succeeded()
