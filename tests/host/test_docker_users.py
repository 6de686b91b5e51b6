"""Who may use docker without sudo, and from when on; the runs themselves never depend on it."""

from __future__ import annotations

import subprocess
from itertools import takewhile

from tests.host.prepared import Prepared, prepared
from tests.labkit import Guest, info

__all__ = ["prepared"]

USERS = "Docker | Add users to the docker group"
END = "that-was-all"


def test_a_run_needs_no_membership_and_gives_none_unasked(prepared: Prepared) -> None:
    # The first run installed docker over a login that could not have been in its group.
    assert prepared.first.exit_code == 0
    assert prepared.guest.run("getent group docker").endswith(":")


def test_a_user_who_is_named_can_use_docker_from_the_next_login_on(prepared: Prepared) -> None:
    guest, user = prepared.guest, info()["ssh"]["user"]
    with Session(guest) as before:
        assert "permission denied" in before.says("docker ps 2>&1 | tail -n 1")
        prepared.site.choose(docker={"users": [user]})

        run = prepared.run()

        assert (run.exit_code, run.changed) == (0, [USERS]), run.stderr[-3000:]
        assert f"{user}: docker without sudo from the next login on" in run.stderr
        with Session(guest) as fresh:
            assert fresh.says("docker ps --format x >/dev/null 2>&1 && echo works") == "works"
        # The pitfall, and the way out that the run names.
        assert "permission denied" in before.says("docker ps 2>&1 | tail -n 1")
        assert before.says("echo 'docker ps --format x && echo works' | newgrp docker") == "works"
    prepared.run().must_have_changed_nothing()


def test_a_user_that_does_not_exist_is_refused_by_name(prepared: Prepared) -> None:
    prepared.site.choose(docker={"users": ["nobody-here"]})
    run = prepared.run()
    assert run.exit_code != 0
    assert "docker.users: no such user on this host: nobody-here" in run.stderr


class Session:
    """A login that stays open, as a person's terminal does."""

    def __init__(self, guest: Guest):
        self._shell = subprocess.Popen(
            [*guest.login(), "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, bufsize=1,
        )  # fmt: skip

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.terminate()
        self._shell.wait(timeout=10)

    def says(self, command: str) -> str:
        """Run a command in the session; return what it printed, which may be nothing."""
        if self._shell.stdin is None or self._shell.stdout is None:
            raise RuntimeError("the session has no pipes")
        print(f"{{ {command}; }}; echo {END}", file=self._shell.stdin)
        return "".join(takewhile(lambda line: line.strip() != END, self._shell.stdout)).strip()
