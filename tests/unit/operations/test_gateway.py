"""The gateway's files: sent when they differ, applied by a reload, secrets never shown."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spark_contract.gateway import Gateway, tls_of

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.secrets import GENERATED, SecretRef
from spark_deploy.hosts import gateway
from spark_deploy.hosts.certificates import issue
from spark_deploy.hosts.gateway import (
    Calendars,
    GatewayCertificate,
    TailnetAddress,
    Timers,
    WatchTools,
)
from spark_deploy.hosts.status import HostStatus
from spark_deploy.plan.gateway import gateway_file
from spark_deploy.plan.types import GatewayPlan, ManagedFile, TlsPlan
from tests.unit.operations.fake_host import FakeHost, on, run_operation, state_of, unpack_sent
from tests.unit.payload.test_certificates import openssl, pair, public
from tests.unit.shell import install_stub, run_script
from tests.unit.statuses import told

PLAN = GatewayPlan(
    settings=Gateway("main", "loopback", 8000, 1 << 20, None, "/etc/spark/api-key", None),
    address="spark.example.org",
    key=GENERATED,
    tls=None,
)
TLS = tls_of("main")
RELEASE = "main-222222222222"
RELOAD = "/usr/local/lib/spark/current/bin/spark-host gateway-reload main"
RESTART_WATCH = f"systemctl restart spark-watch@{RELEASE}.service"
OLD_TOOLS, NEW_TOOLS = (f"/usr/local/lib/spark/{digit * 12}" for digit in "13")


def exposed(expose: Any, tls: TlsPlan | None = None) -> GatewayPlan:
    settings = replace(PLAN.settings, expose=expose, tls=TLS if tls else None)
    return replace(PLAN, settings=settings, tls=tls)


def host_with(
    *files: ManagedFile, active: bool = True, difference: str | None = None, tools: str = OLD_TOOLS
) -> FakeHost:
    """Return a host with files, a gateway, and a watchdog of the old tools."""
    contents = {file.path: file.content for file in files}
    state = {"active": "active" if active else "inactive", "difference": difference}
    return FakeHost(
        files=files,
        Status=told({"services": {"main": {"gateway": state, "active": RELEASE}}}),
        WatchTools=OLD_TOOLS,
        SymlinkTarget=tools,
        GatewayCertificate=lambda certificate, key: (
            contents.get(certificate, b"").strip(),
            public(contents[key]).strip() if key in contents else b"",
        ),
    )


def configure(host: FakeHost, plan: GatewayPlan, executing: bool = True) -> list[Any]:
    with on(host, executing):
        return list(gateway.configure_gateway._inner(plan))


def test_gateway_as_planned_stays_unchanged() -> None:
    host = host_with(gateway_file(PLAN))
    assert configure(host, PLAN) == []
    assert host.noops == ["the gateway is as planned"]


def test_changed_settings_are_applied_by_a_reload() -> None:
    put, reload = configure(host_with(gateway_file(PLAN)), exposed("lan"))
    assert unpack_sent(put) == [gateway_file(exposed("lan")).content]
    assert str(reload) == RELOAD


def test_reloads_no_gateway_before_the_first_release() -> None:
    [put] = configure(host_with(active=False), PLAN)
    assert unpack_sent(put) == [gateway_file(PLAN).content]


def test_changed_settings_reload_a_running_gateway_and_log_the_reason() -> None:
    host = host_with(gateway_file(PLAN), difference="listens on 0.0.0.0")
    assert list(map(str, configure(host, PLAN))) == [RELOAD]
    assert host.logs == ["gateway: listens on 0.0.0.0"]


@pytest.mark.parametrize(
    ("expose", "tools", "running", "restarts"),
    [
        *((expose, OLD_TOOLS, OLD_TOOLS, False) for expose in ("docker", "tailscale")),
        *((expose, NEW_TOOLS, OLD_TOOLS, True) for expose in ("docker", "tailscale")),
        ("docker", NEW_TOOLS, "", False),
        ("loopback", NEW_TOOLS, OLD_TOOLS, False),  # follows no late address
    ],
)
def test_restarts_a_watchdog_of_older_tools_that_would_undo_the_reload(
    expose: str, tools: str, running: str, restarts: bool
) -> None:
    plan = exposed(expose)
    host = host_with(gateway_file(plan), difference="changed settings", tools=tools)
    host.facts["WatchTools"] = running
    assert list(map(str, configure(host, plan))) == [*([RESTART_WATCH] * restarts), RELOAD]
    assert configure(host_with(gateway_file(plan), tools=tools), plan) == []


def test_fact_reads_the_tools_of_the_watchdog_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["sleep", "60"], env={"PATH": "/bin:/usr/bin", "PYTHONPATH": "/tools/1:/tools/site"}
    )
    pid_of = f'case "$*" in *spark-watch@main-1.service) echo {process.pid};; *) echo 0;; esac'
    install_stub(tmp_path, "systemctl", pid_of)
    try:
        for release, tools in (("main-1", "/tools/1"), ("main-2", "")):
            script = "exec 2>&1\n" + WatchTools().command(release=release)
            assert WatchTools().process(run_script(script, tmp_path)) == tools
    finally:
        process.kill()
        process.wait()


def test_removes_the_certificate_of_an_earlier_exposure() -> None:
    old_key = ManagedFile(TLS.key, b"old", 0o600)
    commands = configure(host_with(gateway_file(PLAN), old_key), PLAN)
    assert list(map(str, commands)) == [f"rm -f -- {TLS.key}", RELOAD]


def with_key(folder: Path, key: str) -> GatewayPlan:
    (folder / "key").write_text(f"{key}\n")
    return replace(PLAN, key=SecretRef(file=str(folder / "key")))


def test_key_of_the_controller_is_sent_on_standard_input_only(tmp_path: Path) -> None:
    plan = with_key(tmp_path, "a-key-of-my-own-0123456789")
    key = ManagedFile("/etc/spark/api-key", b"a-key-of-my-own-0123456789\n", 0o600)
    host = host_with(gateway_file(plan))
    commands = configure(host, plan)
    assert unpack_sent(commands[0]) == [key.content]
    assert "put 0 600 /etc/spark/api-key" in str(commands[0])
    assert "a-key-of" not in " ".join([*map(str, commands), *host.logs])
    assert configure(host_with(gateway_file(plan), key), plan) == []


def test_refuses_an_unusable_key_without_showing_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"serve\.api_key") as raised:
        configure(host_with(), with_key(tmp_path, "blank in it 0123456789"))
    assert "blank" not in str(raised.value)


def test_own_certificate_is_sent_with_a_private_key(tmp_path: Path) -> None:
    certificate, key = pair(tmp_path, "DNS:spark.example.org")
    plan = exposed("lan", TlsPlan("own-cert", certificate, key, "", ("spark.example.org",)))
    host = host_with(gateway_file(plan))
    put, reload = configure(host, plan)
    assert unpack_sent(put) == [Path(certificate).read_bytes(), Path(key).read_bytes()]
    assert re.search(r"put 1 600 \S+/main\.key", str(put))
    assert str(reload) == RELOAD
    assert "PRIVATE" not in f"{put} {host.log_text}"


@pytest.fixture
def private(tmp_path: Path) -> GatewayPlan:
    names = ("spark.example.org", "10.0.0.9")
    return exposed("lan", TlsPlan("private-ca", "", "", str(tmp_path / "ca"), names))


def test_prediction_creates_no_ca(private: GatewayPlan) -> None:
    commands = configure(host_with(gateway_file(private)), private, executing=False)
    assert list(map(str, commands)) == ["true", RELOAD]
    assert private.tls is not None
    assert not Path(private.tls.ca_dir).exists()


def test_private_ca_issues_a_certificate_once(private: GatewayPlan, tmp_path: Path) -> None:
    host = host_with(gateway_file(private))
    certificate, key = unpack_sent(configure(host, private)[0])
    (tmp_path / "leaf.pem").write_bytes(certificate)
    openssl("verify", "-CAfile", tmp_path / "ca/ca.pem", tmp_path / "leaf.pem")
    assert "there is no CA" in host.log_text

    crt = ManagedFile(TLS.certificate, certificate)
    good = host_with(gateway_file(private), crt, ManagedFile(TLS.key, key, 0o600))
    assert configure(good, private) == []
    readable = host_with(gateway_file(private), crt, ManagedFile(TLS.key, key))
    assert len(unpack_sent(configure(readable, private)[0])) == 2
    assert "with mode 600" in readable.log_text


def test_certificate_that_ends_soon_is_renewed(private: GatewayPlan) -> None:
    assert private.tls is not None
    due = issue(private.tls.names, private.tls.ca_dir, days=20)
    files = (ManagedFile(TLS.certificate, due.certificate), ManagedFile(TLS.key, due.key, 0o600))
    host = host_with(gateway_file(private), *files)
    put, reload = configure(host, private)
    assert unpack_sent(put)[0] != due.certificate
    assert str(reload) == RELOAD
    assert "it ends on" in host.log_text


@pytest.mark.parametrize(
    ("host", "key", "pattern"),
    [
        (host_with(), GENERATED, RELOAD.replace("gateway-reload", "gateway-new-key")),
        (host_with(), SecretRef(env="SPARK_KEY"), r"_refuse\(.*env SPARK_KEY"),
        (FakeHost(Status=HostStatus(None)), GENERATED, r"_refuse\(.*no release was deployed here"),
    ],
)
def test_new_key_is_generated_on_the_host_or_refused(
    host: FakeHost, key: Any, pattern: str
) -> None:
    [command] = run_operation(host, gateway.replace_key, replace(PLAN, key=key))
    assert re.match(pattern, command)


TIMER_NAME = "spark-hours@main-aaaaaaaaaaaa.timer"
OLD_TIMER = "spark-hours@main-bbbbbbbbbbbb.timer"
TIMER = ManagedFile(f"/etc/systemd/system/{TIMER_NAME}", b"[Timer]\n")


def set_timers(running: dict[str, bool], *wanted: ManagedFile, rejected: str = "") -> list[str]:
    files = {TIMER.path: state_of(TIMER)} if TIMER_NAME in running else {}
    host = FakeHost(Timers=running, FileStates=files, Calendars=rejected)
    return run_operation(host, gateway.set_timers, ["20:00"] * len(wanted), wanted)


def test_timers_are_placed_started_and_removed() -> None:
    start = f"systemctl enable {TIMER_NAME} && systemctl restart {TIMER_NAME}"
    _, command = set_timers({}, TIMER)
    assert start in command
    assert set_timers({TIMER_NAME: True}, TIMER) == []
    [command] = set_timers({TIMER_NAME: False}, TIMER)  # stopped by hand
    assert start in command
    [command] = set_timers({OLD_TIMER: True})
    assert f"disable --now {OLD_TIMER}; rm -f /etc/systemd/system/{OLD_TIMER};" in command


def test_refuses_a_time_that_systemd_rejects() -> None:
    [command] = set_timers({}, TIMER, rejected=Calendars().process(["25:00"]))
    assert "_refuse(spark-1: schedule: '25:00' is no time" in command


@pytest.mark.parametrize(
    ("fact", "output", "value"),
    [
        (GatewayCertificate, ["-----BEGIN C", "x", "== key", "-----BEGIN P", "y"],
         (b"-----BEGIN C\nx", b"-----BEGIN P\ny")),
        (GatewayCertificate, ["== key"], (b"", b"")),
        (TailnetAddress, ["100.101.102.103"], "100.101.102.103"),
        (TailnetAddress, [], ""),
        (Calendars, [], ""),
        (Timers, [f"{TIMER_NAME} active enabled", f"{OLD_TIMER} inactive disabled", "x failed y"],
         {TIMER_NAME: True, OLD_TIMER: False, "x": False}),
    ],
)  # fmt: skip
def test_facts_parse_output(fact: Any, output: list[str], value: Any) -> None:
    assert fact().process(output) == value
