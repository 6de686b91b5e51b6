"""``stop`` and ``start`` run the host tools on every selected host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_deploy.cli import stop
from spark_deploy.cli.options import Options
from spark_deploy.cli.query_hosts import Answer
from spark_deploy.config.checkout import CHECKOUT
from spark_deploy.config.errors import SparkError

SERVE = SimpleNamespace(start_timeout_s=1, stop_timeout_s=1)
LISTED = SimpleNamespace(
    name="spark-1",
    data={"_sudo": True},
    settings=SimpleNamespace(
        settings=SimpleNamespace(
            serve=SERVE, services={"embed": None}, cluster=SimpleNamespace(hosts=())
        )
    ),
)


def run(command: str, options: Options, **given: Any) -> int:
    needed = {"service": None, **({"period": None} if command == "stop" else {})}
    return int(getattr(stop, command).callback.__wrapped__(options, **{**needed, **given}))


@pytest.mark.parametrize("command", ["stop", "start"])
def test_a_single_member_of_a_cluster_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(cluster=SimpleNamespace(hosts=("spark-1", "spark-2")))
    half = SimpleNamespace(name="spark-2", settings=SimpleNamespace(settings=settings))
    monkeypatch.setattr(stop, "select_hosts", lambda _, judged: [half])
    with pytest.raises(SparkError) as caught:
        run(command, Options(inventory="own.py"))
    assert "serves together with spark-1" in str(caught.value)
    fix = f"spark-deploy {command} spark-1 spark-2 --inventory own.py"
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("command", "period", "chosen", "orders"),
    [
        ("stop", None, None, ["stop-service main --by ", "stop-service embed --by "]),
        ("stop", "90m", None, [" --for 5400 2>"]),
        ("stop", "2d", "embed", ["stop-service embed", " --for 172800 2>"]),
        ("start", None, None, ["start-service main 2>", "start-service embed 2>"]),
        ("stop", None, "embed", ["stop-service embed --by "]),
    ],
)
def test_hosts_run_one_command_per_service_and_the_output_is_shown(
    command: str,
    period: str | None,
    chosen: str | None,
    orders: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[str] = []

    class Host:
        def run_shell_command(self, words: Any, **_: Any) -> tuple[bool, Any]:
            commands.append(str(words))
            return True, SimpleNamespace(stdout="stopped\n")

    monkeypatch.setattr(stop, "select_hosts", lambda _, judged: [LISTED])
    monkeypatch.setattr(
        stop, "query",
        lambda hosts, run, doing: [Answer(item, run(Host(), item)) for item in hosts],
    )  # fmt: skip
    assert run(command, Options(), service=chosen, **({"period": period} if period else {})) == 0
    assert capsys.readouterr().out == "spark-1: stopped\n"
    assert len(commands) == 1
    assert all(order in commands[0] for order in orders)
    assert commands[0].count(f"{command}-service") == (1 if chosen else 2)


def test_an_unknown_service_gets_a_suggestion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop, "select_hosts", lambda _, judged: [LISTED])
    with pytest.raises(SparkError, match="did you mean embed"):
        run("stop", Options(), service="embd")


@pytest.mark.parametrize("command", ["stop", pytest.param("start", marks=pytest.mark.slow)])
def test_both_commands_patch_gevent_in_time(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spark_deploy", command, str(tmp_path / "none.py")],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    # A warning here would mean that gevent patched too late.
    assert re.fullmatch(r"\S+none.py: is not an inventory file\n  fix: .*\n", done.stderr)


@pytest.mark.parametrize("period", ["", "1", "h", "0h", "-1h", "1w", "1.5h", "1h30m", "²h"])
def test_an_invalid_period_is_refused_before_any_query(period: str) -> None:
    with pytest.raises(SparkError, match="is not a period"):
        run("stop", Options(), period=period)
