import os
import subprocess
from typing import Any

import pytest

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.patterns import SecretRef
from spark_deploy.config.settings.sources import ProxySettings
from spark_deploy.hosts import downloads
from spark_deploy.hosts.downloads import DOCKER_DROP_IN, DROP_IN_PATH, DaemonProxy, proxy_file
from tests.unit.operations.fake_host import FakeHost, on, unpack_sent
from tests.unit.shell import install_stub, run_script

PATH = "/etc/spark/proxy.env"
PASSWORD = "canary-5d1f"
PROXY, NO_PROXY = ProxySettings("http://proxy:3128"), ProxySettings()


def set_job_proxy(settings, *files):
    with on(FakeHost(files=files)):
        return list(downloads.configure_job_proxy._inner(settings))


def set_docker_proxy(settings, *files, daemon):
    with on(FakeHost(files=files, DaemonProxy=daemon)):
        return list(map(str, downloads.configure_docker_proxy._inner(settings)))


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "proxy").write_text(f"http://ann:{PASSWORD}@proxy:3128\n")
    return ProxySettings(SecretRef(file=str(tmp_path / "proxy")), direct=("lan", "10.0.0.1"))


def test_proxy_password_is_written_to_a_root_only_file_through_stdin(secret):
    [command] = set_job_proxy(secret)
    assert PASSWORD not in repr(command) + str(command)
    [content] = unpack_sent(command)
    address = f"http://ann:{PASSWORD}@proxy:3128"
    assert content.decode().splitlines() == [
        f"http_proxy={address}", f"HTTP_PROXY={address}", f"https_proxy={address}",
        f"HTTPS_PROXY={address}", "no_proxy=lan,10.0.0.1", "NO_PROXY=lan,10.0.0.1",
    ]  # fmt: skip
    assert f"put 0 600 {PATH}" in str(command)


def test_proxy_file_changes_only_with_the_proxy_setting(secret):
    assert set_job_proxy(secret, proxy_file(secret)) == []
    [command] = set_job_proxy(NO_PROXY, proxy_file(secret))
    assert str(command) == f"rm -f -- {PATH}"
    assert set_job_proxy(NO_PROXY) == []


@pytest.mark.parametrize(
    ("settings", "managed", "daemon", "expected"),
    [
        (PROXY, False, "differs", [DROP_IN_PATH, "restart"]),
        (PROXY, True, "differs", ["restart"]),
        (PROXY, True, "same", []),
        (PROXY, True, "same-proxy", ["restart"]),
        (PROXY, False, "same", []),
        (PROXY, False, "same-proxy", []),
        (NO_PROXY, False, "differs", []),
        (NO_PROXY, True, "same", [f"rm -f -- {DROP_IN_PATH}", "restart"]),
    ],
)
def test_docker_restarts_only_if_the_proxy_changed(settings, managed, daemon, expected):
    commands = set_docker_proxy(settings, *([DOCKER_DROP_IN] * managed), daemon=daemon)
    assert len(commands) == len(expected)
    for command, fragments in zip(commands, expected, strict=True):
        assert fragments.replace("restart", "systemctl restart docker.service") in command


@pytest.mark.parametrize(
    "address", ['http://a:b"c@p:1', "http://a:b c@p:1", "proxy:3128", "http://a:b\\c@p"]
)
def test_proxy_address_that_systemd_misreads_is_rejected_without_showing_it(tmp_path, address):
    (tmp_path / "proxy").write_text(address)
    with pytest.raises(SettingsError) as caught:
        set_job_proxy(ProxySettings(SecretRef(file=str(tmp_path / "proxy"))))
    assert "proxy.url" in str(caught.value)
    assert address not in str(caught.value)


SLASH = ("HTTP_PROXY=http://proxy:3128/", "HTTPS_PROXY=http://proxy:3128/")


def lines_of(settings):
    return proxy_file(settings).content.decode().splitlines()


@pytest.mark.parametrize(
    ("environment", "result"),
    [
        (lines_of(PROXY), "same"),
        ([*SLASH, "NO_PROXY=localhost,127.0.0.1,::1"], "same"),
        ([*SLASH, "NO_PROXY=.lan"], "same-proxy"),
        (["http_proxy=http://proxy:3128", "https_proxy=http://proxy:3128"], "same-proxy"),
        (lines_of(ProxySettings("http://x:1")), "differs"),
        (["HTTP_PROXY=http://proxy:3128"], "differs"),
        ([], "differs"),
    ],
)
def test_proxy_fact_compares_the_docker_environment_with_the_file(tmp_path, environment, result):
    file = tmp_path / "proxy.env"
    file.write_bytes(proxy_file(PROXY).content)
    clean = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    variables: Any = dict(line.split("=", 1) for line in environment)
    daemon = subprocess.Popen(["sleep", "60"], env={**clean, **variables})
    install_stub(tmp_path, "systemctl", f"echo {daemon.pid}")
    try:
        lines = run_script(DaemonProxy().command(str(file)), tmp_path)
    finally:
        daemon.kill()
        daemon.wait()
    assert lines == [result] == [DaemonProxy().process(lines)]
