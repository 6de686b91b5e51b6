from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from pyinfra.api import FactBase

from spark_deploy.cli import hosts as cli_hosts
from spark_deploy.cli.hosts import check_access
from spark_deploy.inventory.host_keys import Endpoint, HostKey
from spark_deploy.inventory.login import LoginResult


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    def query_host_key(endpoint):
        state: Any = "unreachable" if endpoint.host == "off" else "known"
        return HostKey(endpoint, endpoint.hostname, tmp_path, state, None, None, "no route")

    monkeypatch.setattr(cli_hosts.host_keys, "query_host_key", query_host_key)
    monkeypatch.setattr(
        cli_hosts.login, "try_key", lambda endpoint: LoginResult(endpoint.host == "ready", True)
    )
    return [SimpleNamespace(name=name, data={}) for name in ("ready", "strange", "off")]


def test_every_inaccessible_host_is_reported(hosts):
    off, strange = check_access(hosts).problems()
    assert (off.where, off.what) == ("off", "unreachable: no route")
    assert (strange.where, "SSH key" in strange.what) == ("strange", True)
    assert "spark-deploy up" in strange.fix


def test_local_machine_is_not_accessible_if_sudo_needs_a_password(monkeypatch):
    probed: list[Endpoint] = []
    monkeypatch.setattr(cli_hosts.host_keys, "query_host_key", probed.append)
    monkeypatch.setattr(cli_hosts.login, "try_key", lambda endpoint: LoginResult(True, False))
    result = check_access([SimpleNamespace(name="@local", data={})])
    assert [endpoint.host for endpoint in result.without_access] == ["@local"]
    assert "deploys/bootstrap.py" in next(result.problems()).fix
    assert not probed


def test_query_timeout_lists_only_hosts_without_an_answer(monkeypatch, capsys):
    def connect(host, **_options):
        gevent.sleep(0.3 if host.name == "slow" else 0)

    monkeypatch.setattr(cli_hosts, "QUIET_PERIOD_S", 0.1)
    monkeypatch.setattr(cli_hosts.Host, "connect", connect)
    targets: list[Any] = [SimpleNamespace(name=name, data={}) for name in ("fast", "slow")]
    cli_hosts.query(targets, lambda *_: "yes", verb="stopping")
    assert capsys.readouterr().err == "stopping slow: 0 s\n"
    cli_hosts.query(targets[:1], lambda *_: "yes")
    assert capsys.readouterr().err == ""


def test_query_that_runs_an_endless_command_ends_at_the_timeout(monkeypatch):
    class Endless(FactBase):
        def command(self):
            return "while :; do echo; sleep 0.1; done"

    monkeypatch.setattr(cli_hosts, "_FACT_TIMEOUT_S", 1)
    target: Any = SimpleNamespace(name="@local", data={})
    with gevent.Timeout(20):
        [answer] = cli_hosts.query([target], lambda host, _: host.get_fact(Endless))
    assert answer.value is None
    assert "longer than 1 s" in answer.problem
