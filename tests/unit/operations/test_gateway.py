"""The gateway's files: sent when they differ, taken over by a reload, secrets never in view."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.command import FunctionCommand
from spark_contract.gateway import Gateway, tls_of

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.secrets import GENERATED, SecretRef
from spark_deploy.hosts import gateway
from spark_deploy.hosts.certificates import issue
from spark_deploy.hosts.gateway import GatewayCertificate, TailnetAddress, WatchTools
from spark_deploy.hosts.status import HostStatus
from spark_deploy.plan.gateway import gateway_file
from spark_deploy.plan.types import GatewayPlan, ManagedFile, TlsPlan
from tests.unit.operations.test_operations import FakeHost, on, sent_files
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


def lan(tls: TlsPlan | None = None) -> GatewayPlan:
    settings = dataclasses.replace(PLAN.settings, expose="lan", tls=TLS if tls else None)
    return dataclasses.replace(PLAN, settings=settings, tls=tls)


RELOAD = "/usr/local/lib/spark/current/bin/spark-host gateway-reload main"


OLD_TOOLS, NEW_TOOLS = (f"/usr/local/lib/spark/{digit * 12}" for digit in "13")


def host_with(
    *files: ManagedFile, active: bool = True, difference: str | None = None, tools: str = OLD_TOOLS
) -> FakeHost:
    """Return a host with files and a gateway; its watchdog runs the old tools."""
    contents = {file.path: file.content for file in files}
    gate = {"active": "active" if active else "inactive", "difference": difference}
    return FakeHost(
        files=files,
        Status=told({"services": {"main": {"gateway": gate, "active": RELEASE}}}),
        WatchTools=OLD_TOOLS,
        SymlinkTarget=tools,
        GatewayCertificate=lambda certificate, key: (
            contents.get(certificate, b"").strip(),
            public(contents[key]).strip() if key in contents else b"",
        ),
    )


def run(host: FakeHost, plan: GatewayPlan, executing: bool = True) -> list[Any]:
    with on(host, executing):
        return list(gateway.configure_gateway._inner(plan))


def test_a_gateway_as_planned_is_left_alone() -> None:
    host = host_with(gateway_file(PLAN))
    assert run(host, PLAN) == []
    assert host.noops == ["the gateway is as planned"]


def test_changed_settings_are_sent_and_taken_over_without_the_engine() -> None:
    wider = lan()
    commands = run(host_with(gateway_file(PLAN)), wider)
    assert sent_files(commands[0]) == [gateway_file(wider).content]
    assert [str(command) for command in commands[1:]] == [RELOAD]


def test_before_the_first_release_there_is_nothing_to_reload() -> None:
    commands = run(host_with(active=False), PLAN)
    assert len(commands) == 1
    assert sent_files(commands[0]) == [gateway_file(PLAN).content]


def test_a_gateway_that_runs_with_something_else_is_reloaded_and_says_why() -> None:
    host = host_with(gateway_file(PLAN), difference="listens on 0.0.0.0")
    assert [str(command) for command in run(host, PLAN)] == [RELOAD]
    assert host.logs == ["gateway: listens on 0.0.0.0"]


RENEWED = f"systemctl restart spark-watch@{RELEASE}.service"


@pytest.mark.parametrize("expose", ["docker", "tailscale"])
def test_a_watch_of_older_code_cannot_render_the_gateway_its_own_way_again(expose: Any) -> None:
    """It follows late addresses with the code that it began with, and would undo the reload."""
    settings = dataclasses.replace(PLAN.settings, expose=expose)
    plan = dataclasses.replace(PLAN, settings=settings)
    host = host_with(gateway_file(plan), difference="its settings or its key changed")
    assert [str(command) for command in run(host, plan)] == [RELOAD]
    host.facts["SymlinkTarget"] = NEW_TOOLS
    assert [str(command) for command in run(host, plan)] == [RENEWED, RELOAD]
    host.facts["WatchTools"] = ""
    assert [str(command) for command in run(host, plan)] == [RELOAD]


def test_a_watch_that_renders_nothing_or_the_same_goes_on() -> None:
    early = host_with(
        gateway_file(PLAN), difference="its settings or its key changed", tools=NEW_TOOLS
    )
    assert [str(command) for command in run(early, PLAN)] == [RELOAD]
    docker = dataclasses.replace(PLAN, settings=dataclasses.replace(PLAN.settings, expose="docker"))
    assert run(host_with(gateway_file(docker), tools=NEW_TOOLS), docker) == []


def test_the_code_of_a_watch_is_that_of_its_process(tmp_path: Path) -> None:
    running = subprocess.Popen(
        ["sleep", "60"], env={"PATH": "/bin:/usr/bin", "PYTHONPATH": "/tools/1:/tools/site"}
    )
    pid_of = f'case "$*" in *spark-watch@main-1.service) echo {running.pid};; *) echo 0;; esac'
    install_stub(tmp_path, "systemctl", pid_of)

    def seen(release: str) -> str:
        return WatchTools().process(
            run_script("exec 2>&1\n" + WatchTools().command(release=release), tmp_path)
        )

    try:
        assert seen("main-1") == "/tools/1"
        assert seen("main-2") == ""
    finally:
        running.kill()
        running.wait()


def test_a_certificate_of_an_earlier_exposure_is_taken_away() -> None:
    left = ManagedFile(TLS.key, b"old", 0o600)
    commands = run(host_with(gateway_file(PLAN), left), PLAN)
    assert str(commands[0]) == f"rm -f -- {TLS.key}"
    assert str(commands[1]) == RELOAD


@pytest.fixture
def key_plan(tmp_path: Path) -> GatewayPlan:
    key = tmp_path / "key"
    key.write_text("a-key-of-my-own-0123456789\n")
    return dataclasses.replace(PLAN, key=SecretRef(file=str(key)))


def test_a_key_of_the_controller_travels_on_standard_input_only(key_plan: GatewayPlan) -> None:
    host = host_with(gateway_file(key_plan))
    commands = run(host, key_plan)
    assert sent_files(commands[0]) == [b"a-key-of-my-own-0123456789\n"]
    assert "put 0 600 /etc/spark/api-key" in str(commands[0])
    assert "a-key-of" not in " ".join([*map(str, commands), *host.logs])
    there = ManagedFile("/etc/spark/api-key", b"a-key-of-my-own-0123456789\n", 0o600)
    assert run(host_with(gateway_file(key_plan), there), key_plan) == []


def test_an_unusable_key_of_the_controller_is_refused_without_showing_it(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("blank in it 0123456789\n")
    plan = dataclasses.replace(PLAN, key=SecretRef(file=str(key)))
    with pytest.raises(SettingsError, match=r"serve\.api_key") as raised:
        run(host_with(), plan)
    assert "blank" not in str(raised.value)


def test_the_user_s_own_certificate_is_sent_with_its_key_for_root_alone(tmp_path: Path) -> None:
    certificate, key = pair(tmp_path, "DNS:spark.example.org")
    tls = TlsPlan("own-cert", certificate, key, "", ("spark.example.org",))
    plan = lan(tls)
    host = host_with(gateway_file(plan))
    commands = run(host, plan)
    assert sent_files(commands[0]) == [Path(certificate).read_bytes(), Path(key).read_bytes()]
    assert re.search(r"put 1 600 \S+/main\.key", str(commands[0]))
    assert str(commands[-1]) == RELOAD
    assert "PRIVATE" not in " ".join([*map(str, commands), *host.logs])


@pytest.fixture
def private(tmp_path: Path) -> GatewayPlan:
    tls = TlsPlan("private-ca", "", "", str(tmp_path / "ca"), ("spark.example.org", "10.0.0.9"))
    return lan(tls)


def test_a_prediction_makes_no_ca(private: GatewayPlan) -> None:
    commands = run(host_with(gateway_file(private)), private, executing=False)
    assert [str(command) for command in commands] == ["true", RELOAD]
    assert not Path(private.tls.ca_dir).exists()


def test_a_host_gets_a_certificate_of_the_ca_once(private: GatewayPlan, tmp_path: Path) -> None:
    host = host_with(gateway_file(private))
    certificate, key = sent_files(run(host, private)[0])
    (tmp_path / "leaf.pem").write_bytes(certificate)
    openssl("verify", "-CAfile", f"{private.tls.ca_dir}/ca.pem", tmp_path / "leaf.pem")
    assert any("there is no CA" in line for line in host.logs)

    crt = ManagedFile(TLS.certificate, certificate)
    good = host_with(gateway_file(private), crt, ManagedFile(TLS.key, key, 0o600))
    assert run(good, private) == []
    exposed = host_with(gateway_file(private), crt, ManagedFile(TLS.key, key))
    assert len(sent_files(run(exposed, private)[0])) == 2
    assert any("with mode 600" in line for line in exposed.logs)


def test_a_certificate_that_ends_soon_is_renewed(private: GatewayPlan) -> None:
    due = issue(private.tls.names, private.tls.ca_dir, days=20)
    host = host_with(
        gateway_file(private),
        ManagedFile(TLS.certificate, due.certificate),
        ManagedFile(TLS.key, due.key, 0o600),
    )
    commands = run(host, private)
    assert sent_files(commands[0])[0] != due.certificate
    assert str(commands[-1]) == RELOAD
    assert any("it ends on" in line for line in host.logs)


def test_a_new_key_is_made_on_the_host_or_refused_with_the_place_to_change_it() -> None:
    with on(host_with()):
        made = list(gateway.replace_key._inner(PLAN))
    assert [str(c) for c in made] == [RELOAD.replace("gateway-reload", "gateway-new-key")]
    given = dataclasses.replace(PLAN, key=SecretRef(env="SPARK_KEY"))
    with on(host_with()):
        refused = list(gateway.replace_key._inner(given))
    assert isinstance(refused[0], FunctionCommand)
    assert "env SPARK_KEY" in refused[0].args[0]


def test_a_host_without_anything_of_ours_is_told_to_deploy_first() -> None:
    with on(FakeHost(Status=HostStatus(None))):
        [refused] = gateway.replace_key._inner(PLAN)
    assert isinstance(refused, FunctionCommand)
    assert "no release was deployed here yet" in refused.args[0]


def test_what_hosts_say_is_read() -> None:
    read = GatewayCertificate().process(["-----BEGIN C", "x", "== key", "-----BEGIN P", "y"])
    assert read == (b"-----BEGIN C\nx", b"-----BEGIN P\ny")
    assert GatewayCertificate().process(["== key"]) == (b"", b"")
    assert TailnetAddress().process(["100.101.102.103"]) == "100.101.102.103"
    assert TailnetAddress().process([]) == ""
