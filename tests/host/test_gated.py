"""A gated repository: refused without a token, fetched with one or a login; nothing of it stays."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from lab.paths import HOST_IP, HUB_PORT
from tests.labkit import CHECKOUT, SPARE, STATE, Guest, Site, environment, guest_named, lab
from tests.runs import Run

NAME = SPARE[0]
CANARY = "hf_labcanary7d1e93c0b5"
HUB = f"http://{HOST_IP}:{HUB_PORT}"
REPOSITORY = "lab/gated-int4"
TOKENS = "find /var/lib/spark /etc/spark /run -xdev -name hub-token"
JOB = "systemctl is-active -q 'spark-job@*.service'"
# Looks at every process again and again; a token in an argument would be seen by any user. The
# pattern does not match itself.
WATCH = (
    "rm -f /run/argv-seen; (while [ ! -e /run/argv-stop ]; do "
    "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' "
    f"| grep -a '[{CANARY[0]}]{CANARY[1:]}' >> /run/argv-seen; sleep 0.2; "
    "done) >/dev/null 2>&1 &"
)


@dataclass
class Gated:
    """A host, a checkout with a model in a gated repository, and what runs said."""

    site: Site
    guest: Guest

    def deploy(self, *more: str, login: str | None = None) -> Run:
        return self.site.deploy(*more, env=self.environment(login))

    def environment(self, login: str | None = None) -> dict[str, str]:
        own = {**environment(self.site.checkout), "LAB_HUB": CANARY}
        return own | ({"HF_TOKEN": login, "HF_ENDPOINT": HUB} if login else {})

    def choose(self, **settings: Any) -> None:
        self.site.choices.clear()
        self.site.choose(model="lab-gated", profile="v2", **settings)

    def remove_model(self) -> None:
        """Have the next deploy download the repository again, and a wrong token fail it."""
        self.guest.run(
            "systemctl stop 'spark-serve@*' 'spark-watch@*'; rm -rf /srv/spark/sources/lab--gated*"
        )

    def look(self, *words: str) -> str:
        done = subprocess.run(
            self.site.look_command(*words), capture_output=True, text=True, check=False,
            cwd=self.site.checkout, stdin=subprocess.DEVNULL, timeout=120,
            env={**os.environ, **environment(self.site.checkout), "LAB_HUB": CANARY},
        )  # fmt: skip
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    """Gate a copy of the base, and serve it to a new host as a model of its own."""
    root = tmp_path_factory.mktemp("gated")
    tree = root / "checkout"
    tree.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT, capture_output=True, check=True,
    )  # fmt: skip
    subprocess.run(
        ["tar", "c", "--null", "-T", "-", "-f", str(root / "tree.tar")],
        input=tracked.stdout, cwd=CHECKOUT, check=True,
    )  # fmt: skip
    subprocess.run(["tar", "xf", str(root / "tree.tar"), "-C", str(tree)], check=True)
    model = yaml.safe_load((tree / "catalog/models/lab-stub.yml").read_text())
    model["sources"] = {"base": REPOSITORY}
    (tree / "catalog/models/lab-gated.yml").write_text(yaml.safe_dump(model))
    hub = STATE / "hub"
    shutil.rmtree(hub / REPOSITORY, ignore_errors=True)
    shutil.copytree(hub / "lab/tiny-int4", hub / REPOSITORY)
    (hub / REPOSITORY / "token").write_text(CANARY)
    lab("up", NAME, "--fresh", "--engine", "stub")
    site = Site(root / "site", hosts=[NAME], checkout=tree)
    site.choose(model="lab-gated", profile="v2")
    yield Gated(site, guest_named(NAME))
    shutil.rmtree(hub / REPOSITORY, ignore_errors=True)


def test_without_a_token_the_repository_is_refused_and_with_one_it_is_served(gated):
    refused = gated.deploy()
    assert refused.exit_code != 0
    assert "the repository is gated" in refused.stderr
    assert "hf auth login" in refused.stderr

    gated.site.choose(hub={"token": {"env": "LAB_HUB"}})
    gated.guest.run(f"rm -f /run/argv-stop; {WATCH}")
    run = gated.deploy("-vvv")
    gated.guest.run("touch /run/argv-stop")
    assert run.exit_code == 0, run.stderr[-4000:]
    assert gated.guest.run(TOKENS) == ""
    assert gated.guest.run("cat /run/argv-seen", check=False) == ""
    shown_nowhere(run.stderr + json.dumps(run.document))
    served(gated)

    again = gated.deploy()
    assert again.exit_code == 0, again.stderr[-4000:]
    again.must_have_changed_nothing()


def served(gated: Gated) -> None:
    tree = gated.guest.run("ls -d /srv/spark/sources/lab--gated-int4*")
    assert gated.guest.json(f"cat {tree.splitlines()[0]}/receipt.json")


def shown_nowhere(text: str) -> None:
    """The token is in no text, nor what the transfer makes of it."""
    assert CANARY not in text
    for cut in range(3):
        inside = base64.b64encode(CANARY[cut:].encode()).decode().rstrip("=")[:-2]
        assert inside not in text


def test_the_token_is_in_no_file_and_no_output_of_the_host(gated):
    guest = gated.guest
    # The pattern is sent as base64: sudo writes every command line into the journal.
    pattern = f"/dev/shm/{NAME}-pattern"
    guest.run(f"echo {base64.b64encode(CANARY.encode()).decode()} | base64 -d > {pattern}")
    found = guest.run(
        f"grep -rlFs -f {pattern} /etc /run /var/lib/spark /var/log /usr/local/lib/spark /srv/spark"
        "; true"
    )
    guest.run(f"rm {pattern}")
    assert found == ""
    for words in ("journalctl --no-pager -o export", "systemctl show 'spark-job@*'",
                  "systemctl cat 'spark-job@*'", "docker inspect $(docker ps -aq)"):  # fmt: skip
        assert CANARY not in guest.run(words), words


def test_the_token_is_in_no_answer_and_no_file_of_the_controller(gated):
    for words in (("plan", "--json"), ("plan",), ("status", "--json"),
                  ("status", "--files", "--json"), ("connect", "--json")):  # fmt: skip
        said = gated.look(*words)
        shown_nowhere(said)
        assert NAME in said or words[0] == "plan", said
    for path in gated.site.root.rglob("*"):
        if path.is_file():
            shown_nowhere(path.read_text(errors="replace"))


def test_a_login_is_on_the_host_until_its_download_ends_across_a_reboot(gated):
    gated.choose(downloads={"rate_limit_mib_per_s": 0.4})
    gated.remove_model()
    deploy = subprocess.Popen(
        gated.site.command("--limit", NAME, "-y"), cwd=gated.site.root, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **gated.environment(CANARY)},
    )  # fmt: skip
    try:
        gated.guest.wait(f"{JOB} || {TOKENS} | grep .", seconds=120)
        found = gated.guest.wait(f"{TOKENS} | grep .", seconds=20)
    finally:
        deploy.kill()
        printed = deploy.communicate()[0]
    assert "Hugging Face login" in printed
    shown_nowhere(printed)
    [token] = found.splitlines()
    assert gated.guest.run(f"stat -c '%a %U:%G' {token}; cat {token}") == f"600 root:root\n{CANARY}"
    gated.guest.reboot(seconds=180)
    assert gated.guest.run(TOKENS) == token
    gated.guest.wait("ls /srv/spark/sources/lab--gated-int4*/receipt.json", seconds=180)
    gated.guest.wait(f"! {TOKENS} | grep .", seconds=20)

    run = gated.deploy(login=CANARY)
    assert run.exit_code == 0, run.stderr[-4000:]
    again = gated.deploy(login=CANARY)
    again.must_have_changed_nothing()
    assert gated.guest.run(TOKENS) == ""


def test_a_login_that_the_hub_refuses_fails_the_download_and_leaves_the_host(gated):
    gated.choose()
    gated.remove_model()
    refused = gated.deploy(login="hf_other")
    assert refused.exit_code != 0
    assert "answers 401" in refused.stderr
    assert "hf auth login" in refused.stderr
    gated.guest.wait(f"! {TOKENS} | grep .", seconds=20)
    again = gated.deploy(login=CANARY)
    assert again.exit_code == 0, again.stderr[-4000:]
