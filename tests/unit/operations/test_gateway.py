import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from spark_contract.documents import to_json
from spark_contract.gateway import Gateway, NamedKey, tls_paths

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.patterns import GENERATED, SecretRef
from spark_deploy.hosts import gateway
from spark_deploy.hosts.gateway import Gateways, RejectedCalendar, WatchTools
from spark_deploy.hosts.status import HostStatus
from spark_deploy.plan.gateway import gateway_file
from spark_deploy.plan.types import GatewayPlan, ManagedFile, TlsPlan
from tests.unit.operations.fake_host import FakeHost, on, run_operation, state_of, unpack_sent
from tests.unit.payload.test_certificates import make_pair, openssl, public_key_of
from tests.unit.shell import install_stub, run_script
from tests.unit.statuses import host_status

PLAN = GatewayPlan(
    settings=Gateway("main", "loopback", 8000, 1 << 20, None, "/etc/spark/api-key", None),
    address="spark.example.org",
    key=GENERATED,
    tls=None,
)
TLS = tls_paths("main")
RELEASE = "main-222222222222"
RELOAD = "/usr/local/lib/spark/current/bin/spark-host gateway-reload main"
RESTART_WATCH = f"systemctl restart spark-watch@{RELEASE}.service"
OLD_TOOLS, NEW_TOOLS = (f"/usr/local/lib/spark/{digit * 12}" for digit in "13")


def exposed(expose, tls=None):
    settings = replace(PLAN.settings, expose=expose, tls=TLS if tls else None)
    return replace(PLAN, settings=settings, tls=tls)


def host_with(*files, active=True, difference=None, tools=OLD_TOOLS):
    contents = {file.path: file.content for file in files}
    state = {"active": "active" if active else "inactive", "difference": difference}
    return FakeHost(
        files=files,
        Status=host_status({"services": {"main": {"gateway": state, "active": RELEASE}}}),
        WatchTools=OLD_TOOLS,
        SymlinkTarget=tools,
        GatewayCertificate=lambda certificate, key: (
            contents.get(certificate, b"").strip(),
            public_key_of(contents[key]).strip() if key in contents else b"",
        ),
    )


def configure(host, plan, executing=True):
    with on(host, executing):
        return list(gateway.configure_gateway._inner(plan))


@pytest.mark.parametrize("active", [True, False])
def test_changed_settings_reload_only_a_running_gateway(active):
    put, *reload = configure(host_with(gateway_file(PLAN), active=active), exposed("lan"))
    assert unpack_sent(put) == [gateway_file(exposed("lan")).content]
    assert list(map(str, reload)) == [RELOAD] * active


@pytest.mark.parametrize(
    ("expose", "tools", "running", "restarts"),
    [
        *((expose, OLD_TOOLS, OLD_TOOLS, False) for expose in ("docker", "tailscale")),
        *((expose, NEW_TOOLS, OLD_TOOLS, True) for expose in ("docker", "tailscale")),
        ("docker", NEW_TOOLS, "", False),
        ("loopback", NEW_TOOLS, OLD_TOOLS, False),
    ],
)
def test_restarts_a_watchdog_whose_older_tools_would_undo_the_reload(
    expose, tools, running, restarts
):
    plan = exposed(expose)
    host = host_with(gateway_file(plan), difference="changed settings", tools=tools)
    host.facts["WatchTools"] = running
    assert list(map(str, configure(host, plan))) == [*([RESTART_WATCH] * restarts), RELOAD]
    assert configure(host_with(gateway_file(plan), tools=tools), plan) == []


def test_gateway_fact_reads_the_tools_directory_of_the_running_watchdog(tmp_path):
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


def test_certificate_is_removed_if_tls_is_turned_off():
    old_key = ManagedFile(TLS.key, b"old", 0o600)
    commands = configure(host_with(gateway_file(PLAN), old_key), PLAN)
    assert list(map(str, commands)) == [f"rm -f -- {TLS.key}", RELOAD]


def with_key(folder, key):
    (folder / "key").write_text(f"{key}\n")
    return replace(PLAN, key=SecretRef(file=str(folder / "key")))


def test_controller_api_key_is_sent_only_on_standard_input(tmp_path):
    plan = with_key(tmp_path, "a-key-of-my-own-0123456789")
    key = ManagedFile("/etc/spark/api-key", b"a-key-of-my-own-0123456789\n", 0o600)
    host = host_with(gateway_file(plan))
    commands = configure(host, plan)
    assert unpack_sent(commands[0]) == [key.content]
    assert "put 0 600 /etc/spark/api-key" in str(commands[0])
    assert "a-key-of" not in " ".join([*map(str, commands), *host.logs])
    assert configure(host_with(gateway_file(plan), key), plan) == []


def test_unusable_api_key_is_rejected_without_showing_it(tmp_path):
    with pytest.raises(SettingsError, match=r"serve\.api_key") as raised:
        configure(host_with(), with_key(tmp_path, "blank in it 0123456789"))
    assert "blank" not in str(raised.value)


KEYS = {"anna": NamedKey("0" * 64, 4, None, None)}


@pytest.mark.parametrize(
    ("before", "active", "difference", "puts", "reloads"),
    [
        (None, True, None, True, True), (None, False, None, True, False),
        (KEYS, True, None, False, False),
        (KEYS, True, "changed settings", False, True),
    ],
)  # fmt: skip
def test_changing_named_keys_rewrites_only_the_keys_and_reloads_running_gateways(
    before, active, difference, puts, reloads
):
    deployed = replace(PLAN.settings, expose="lan", keys=before)
    file = ManagedFile(deployed.path, to_json(deployed).encode())
    host = host_with(file, active=active, difference=difference)
    host.facts["Gateways"] = Gateways().process(file.content.decode().splitlines())
    with on(host, True):
        commands = list(gateway.set_named_keys._inner(KEYS))
    sent = [unpack_sent(command) for command in commands[: int(puts)]]
    assert sent == [[to_json(replace(deployed, keys=KEYS)).encode()]] * puts
    assert list(map(str, commands[int(puts) :])) == [RELOAD] * reloads


def test_unchanged_named_keys_reload_only_the_gateways_that_differ():
    gateways = {"main": "changed settings", "search": None}
    services = {
        name: {"gateway": {"active": "active", "difference": difference}}
        for name, difference in gateways.items()
    }
    host = FakeHost(Gateways=(), Status=host_status({"services": services}))
    assert run_operation(host, gateway.set_named_keys, KEYS) == [RELOAD]


def test_gateway_fact_reads_every_gateway_on_the_host():
    documents = [PLAN.settings, replace(PLAN.settings, service="embed", keys=KEYS)]
    output = "".join(map(to_json, documents))
    assert Gateways().process(output.splitlines()) == tuple(documents)
    assert Gateways().process([]) == ()


def test_own_certificate_is_sent_with_a_private_key(tmp_path):
    certificate, key = make_pair(tmp_path, "DNS:spark.example.org")
    plan = exposed("lan", TlsPlan("own-cert", certificate, key, "", ("spark.example.org",)))
    host = host_with(gateway_file(plan))
    put, reload = configure(host, plan)
    assert unpack_sent(put) == [Path(certificate).read_bytes(), Path(key).read_bytes()]
    assert re.search(r"put 1 600 \S+/main\.key", str(put))
    assert str(reload) == RELOAD
    assert "PRIVATE" not in f"{put} {host.log_text}"


@pytest.fixture
def private_ca(tmp_path):
    names = ("spark.example.org", "10.0.0.9")
    return exposed("lan", TlsPlan("private-ca", "", "", str(tmp_path / "ca"), names))


def test_gateway_dry_run_does_not_create_a_ca(private_ca):
    commands = configure(host_with(gateway_file(private_ca)), private_ca, executing=False)
    assert list(map(str, commands)) == ["true", RELOAD]
    assert not Path(private_ca.tls.ca_dir).exists()


def test_private_ca_issues_a_certificate_only_once(private_ca, tmp_path):
    host = host_with(gateway_file(private_ca))
    certificate, key = unpack_sent(configure(host, private_ca)[0])
    (tmp_path / "leaf.pem").write_bytes(certificate)
    openssl("verify", "-CAfile", tmp_path / "ca/ca.pem", tmp_path / "leaf.pem")
    crt = ManagedFile(TLS.certificate, certificate)
    good = host_with(gateway_file(private_ca), crt, ManagedFile(TLS.key, key, 0o600))
    assert configure(good, private_ca) == []
    readable = host_with(gateway_file(private_ca), crt, ManagedFile(TLS.key, key))
    assert len(unpack_sent(configure(readable, private_ca)[0])) == 2


@pytest.mark.parametrize(
    ("host", "key", "pattern"),
    [
        (host_with(), GENERATED, RELOAD.replace("gateway-reload", "gateway-new-key")),
        (host_with(), SecretRef(env="SPARK_KEY"), r"_report_failure\(.*env SPARK_KEY"),
        (
            FakeHost(Status=HostStatus(None)),
            GENERATED,
            r"_report_failure\(.*no release has been deployed on this host",
        ),
    ],
)
def test_new_key_is_generated_on_the_host_unless_configured(host, key, pattern):
    [command] = run_operation(host, gateway.replace_key, replace(PLAN, key=key))
    assert re.match(pattern, command)


TIMER_NAME = "spark-hours@main-aaaaaaaaaaaa.timer"
OLD_TIMER = "spark-hours@main-bbbbbbbbbbbb.timer"
TIMER = ManagedFile(f"/etc/systemd/system/{TIMER_NAME}", b"[Timer]\n")


def set_timers(running, *wanted, rejected=""):
    files = {TIMER.path: state_of(TIMER)} if TIMER_NAME in running else {}
    host = FakeHost(Timers=running, FileStates=files, RejectedCalendar=rejected)
    return run_operation(host, gateway.set_timers, ["20:00"] * len(wanted), wanted)


def test_schedule_timers_are_installed_started_and_removed():
    start = f"systemctl enable {TIMER_NAME} && systemctl restart {TIMER_NAME}"
    _, command = set_timers({}, TIMER)
    assert start in command
    assert set_timers({TIMER_NAME: True}, TIMER) == []
    [command] = set_timers({TIMER_NAME: False}, TIMER)
    assert start in command
    [command] = set_timers({OLD_TIMER: True})
    assert f"disable --now {OLD_TIMER}; rm -f /etc/systemd/system/{OLD_TIMER};" in command


def test_schedule_time_that_systemd_rejects_is_rejected():
    [command] = set_timers({}, TIMER, rejected=RejectedCalendar().process(["25:00"]))
    assert command.startswith("_report_failure(spark-1: schedule: ")
