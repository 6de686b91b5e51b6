"""A proxy for jobs and image pulls: its password in a file of root alone, docker restarted once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.command import StringCommand

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.secrets import SecretRef
from spark_deploy.config.settings.sources import ProxySettings
from spark_deploy.hosts import downloads as proxy
from spark_deploy.hosts.downloads import DaemonProxy
from spark_deploy.plan.types import ManagedFile
from tests.unit.operations.test_operations import FakeHost, on, sent_files
from tests.unit.shell import install_stub, run_script

FILE = "/etc/spark/proxy.env"
PASSWORD = "canary-5d1f"
OPEN = ProxySettings(http="http://proxy:3128")
NONE = ProxySettings()
DROP_IN = proxy.DOCKER_DROP_IN


def host_with(*files: ManagedFile, daemon: str = "same") -> FakeHost:
    """Return a host with files, and a docker that runs with this proxy or another."""
    return FakeHost(files=files, DaemonProxy=daemon)


def commands(host: FakeHost, operation: Any, settings: ProxySettings) -> list[StringCommand]:
    with on(host):
        return list(operation._inner(settings))


@pytest.fixture
def secret(tmp_path: Path) -> ProxySettings:
    (tmp_path / "proxy").write_text(f"http://ann:{PASSWORD}@proxy:3128\n")
    return ProxySettings(https=SecretRef(file=str(tmp_path / "proxy")), direct=("lan", "10.0.0.1"))


def test_a_password_travels_on_standard_input_into_a_file_of_root_alone(secret):
    [command] = commands(host_with(), proxy.configure_job_proxy, secret)
    assert PASSWORD not in repr(command) + str(command)
    [content] = sent_files(command)
    address = f"http://ann:{PASSWORD}@proxy:3128"
    assert content.decode().splitlines() == [
        f"https_proxy={address}", f"HTTPS_PROXY={address}", "no_proxy=lan,10.0.0.1",
        "NO_PROXY=lan,10.0.0.1",
    ]  # fmt: skip
    assert f"put 0 600 {FILE}" in str(command)


def test_a_second_run_changes_nothing_and_no_proxy_takes_the_file_away(secret):
    there = host_with(proxy.proxy_file(secret))
    assert commands(there, proxy.configure_job_proxy, secret) == []
    [command] = commands(there, proxy.configure_job_proxy, NONE)
    assert str(command) == f"rm -f -- {FILE}"
    assert commands(host_with(), proxy.configure_job_proxy, NONE) == []


def test_docker_is_restarted_where_it_runs_with_another_proxy_and_only_there():
    placed, restarted = commands(host_with(daemon="differs"), proxy.configure_docker_proxy, OPEN)
    assert proxy.DROP_IN_PATH in str(placed)
    assert "systemctl restart docker.service" in str(restarted)
    [restarted] = commands(host_with(DROP_IN, daemon="differs"), proxy.configure_docker_proxy, OPEN)
    assert "systemctl restart docker.service" in str(restarted)
    assert commands(host_with(DROP_IN), proxy.configure_docker_proxy, OPEN) == []


@pytest.mark.parametrize("daemon", ["same", "same-proxy"])
def test_docker_that_has_this_proxy_by_its_owners_hand_is_left_alone(daemon):
    """Its restart would restart every container of the owner's."""
    assert commands(host_with(daemon=daemon), proxy.configure_docker_proxy, OPEN) == []


def test_names_that_need_no_proxy_are_kept_as_set_where_the_proxy_is_ours():
    [restarted] = commands(
        host_with(DROP_IN, daemon="same-proxy"), proxy.configure_docker_proxy, OPEN
    )
    assert "systemctl restart docker.service" in str(restarted)


def test_a_proxy_that_the_owner_gave_docker_stays_unless_ours_was_there():
    assert commands(host_with(daemon="differs"), proxy.configure_docker_proxy, NONE) == []
    removed, restarted = commands(host_with(DROP_IN), proxy.configure_docker_proxy, NONE)
    assert str(removed) == f"rm -f -- {proxy.DROP_IN_PATH}"
    assert "systemctl restart docker.service" in str(restarted)


@pytest.mark.parametrize(
    "address", ['http://a:b"c@p:1', "http://a:b c@p:1", "proxy:3128", "http://a:b\\c@p"]
)
def test_what_systemd_would_read_otherwise_is_refused_without_being_shown(tmp_path, address):
    (tmp_path / "proxy").write_text(address)
    settings = ProxySettings(http=SecretRef(file=str(tmp_path / "proxy")))
    with pytest.raises(SettingsError) as caught:
        commands(host_with(), proxy.configure_job_proxy, settings)
    assert "proxy.http" in str(caught.value)
    assert address not in str(caught.value)


def lines_of(settings: ProxySettings) -> list[str]:
    return proxy.proxy_file(settings).content.decode().splitlines()


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (lines_of(OPEN), "same"),
        (["HTTP_PROXY=http://proxy:3128/", "NO_PROXY=localhost,127.0.0.1,::1"], "same"),
        (["HTTP_PROXY=http://proxy:3128", "NO_PROXY=.lan"], "same-proxy"),
        (["http_proxy=http://proxy:3128"], "same-proxy"),
        (lines_of(ProxySettings(http="http://x:1")), "differs"),
        (["HTTP_PROXY=http://proxy:3128", "HTTPS_PROXY=http://proxy:3128"], "differs"),
        ([], "differs"),
    ],
)
def test_the_fact_compares_a_process_with_the_file_and_tells_neither(tmp_path, inside, said):
    """Asked of a process of ours in the daemon's place."""
    file = tmp_path / "proxy.env"
    file.write_bytes(proxy.proxy_file(OPEN).content)
    clean = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    daemon = subprocess.Popen(
        ["sleep", "60"], env={**clean, **dict(line.split("=", 1) for line in inside)}
    )
    install_stub(tmp_path, "systemctl", f"echo {daemon.pid}")
    try:
        lines = run_script(DaemonProxy().command(str(file)), tmp_path)
    finally:
        daemon.kill()
        daemon.wait()
    assert lines == [said] == [DaemonProxy().process(lines)]
