"""Users may use Docker without sudo from their next login on; deploys do not depend on that."""

from __future__ import annotations

import subprocess
from itertools import takewhile

from tests.host.prepared_host import Prepared, prepared
from tests.labkit import Guest, info

__all__ = ["prepared"]

USERS = "Docker | Add users to the docker group"
END = "that-was-all"


def test_run_adds_no_group_members_by_default(prepared: Prepared) -> None:
    assert prepared.first.exit_code == 0
    assert prepared.guest.run("getent group docker").endswith(":")


def test_listed_user_can_use_docker_from_next_login(prepared: Prepared) -> None:
    guest, user = prepared.guest, info()["ssh"]["user"]
    with Session(guest) as before:
        assert "permission denied" in before.run("docker ps 2>&1 | tail -n 1")
        prepared.site.choose(docker={"users": [user]})

        run = prepared.run()

        assert (run.exit_code, run.changed) == (0, [USERS]), run.stderr[-3000:]
        with Session(guest) as fresh:
            assert fresh.run("docker ps --format x >/dev/null 2>&1 && echo works") == "works"
        # The old session needs `newgrp docker`, as the run explains.
        assert "permission denied" in before.run("docker ps 2>&1 | tail -n 1")
        assert before.run("echo 'docker ps --format x && echo works' | newgrp docker") == "works"
    prepared.run().assert_unchanged()


class Session:
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

    def run(self, command: str) -> str:
        if self._shell.stdin is None or self._shell.stdout is None:
            raise RuntimeError("the session has no pipes")
        print(f"{{ {command}; }}; echo {END}", file=self._shell.stdin)
        return "".join(takewhile(lambda line: line.strip() != END, self._shell.stdout)).strip()
