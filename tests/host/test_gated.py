"""A repository that wants a token: refused without, fetched with it, and the token seen nowhere."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml

from tests.labkit import CHECKOUT, SPARE, STATE, Guest, Site, environment, guest_named, lab
from tests.runs import Run

NAME = SPARE[0]
CANARY = "hf_labcanary7d1e93c0b5"
REPOSITORY = "lab/gated-int4"
TOKEN = "/etc/spark/hub-token"
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

    def deploy(self, *more: str) -> Run:
        return self.site.deploy(*more, env={**environment(self.site.checkout), "LAB_HUB": CANARY})

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
    assert "set hub.token" in refused.stderr

    gated.site.choose(hub={"token": {"env": "LAB_HUB"}})
    gated.guest.run(f"rm -f /run/argv-stop; {WATCH}")
    run = gated.deploy("-vvv")
    gated.guest.run("touch /run/argv-stop")
    assert run.exit_code == 0, run.stderr[-4000:]
    assert gated.guest.run(f"stat -c '%a %U:%G' {TOKEN}; cat {TOKEN}") == f"600 root:root\n{CANARY}"
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


def test_the_token_is_in_no_other_file_and_no_word_of_the_host(gated):
    guest = gated.guest
    # The pattern is read from the file: sudo writes every command line into the journal.
    found = guest.run(
        f"grep -rlFs -f {TOKEN} /etc /run /var/lib/spark /var/log /usr/local/lib/spark /srv/spark "
        f"| grep -v '^{TOKEN}$'; true"
    )
    assert found == ""
    for words in ("journalctl --no-pager -o export", "systemctl show 'spark-job@*'",
                  "systemctl cat 'spark-job@*'", "docker inspect $(docker ps -aq)"):  # fmt: skip
        assert CANARY not in guest.run(words), words
    # What root alone can read was no test of what the job had: it was handed over by systemd.
    assert "LoadCredential=hub-token" in guest.run(
        "cat /etc/systemd/system/spark-job@*.service.d/order.conf"
    )


def test_the_token_is_in_no_answer_and_no_file_of_the_controller(gated):
    for words in (("plan", "--json"), ("plan",), ("status", "--json"), ("manifest", "--json"),
                  ("connect", "--json")):  # fmt: skip
        said = gated.look(*words)
        shown_nowhere(said)
        assert NAME in said or words[0] == "plan", said
    for path in gated.site.root.rglob("*"):
        if path.is_file():
            shown_nowhere(path.read_text(errors="replace"))


def test_a_token_that_is_unset_leaves_the_host(gated):
    gated.site.choices.clear()
    gated.site.choose(model="lab-gated", profile="v2")
    run = gated.deploy()
    assert run.exit_code == 0, run.stderr[-4000:]
    assert gated.guest.run(f"test -e {TOKEN} || echo gone") == "gone"
