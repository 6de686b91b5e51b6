import dataclasses
import io
import json
import shutil
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from gateway_client import free_port
from spark_contract.documents import to_json
from spark_contract.status import NETPLAN_FILE, NETPLAN_TRIAL, FabricPlan, FabricPort, SpeedRequest
from spark_contract.tool import HostToolError
from spark_host.system import fabric
from stub_host import Paths, connect_when_listening, write_program

PORT = FabricPort("fab0", "192.168.100.11/24", 9000)
PLAN = FabricPlan("network: {version: 2}\n", (PORT,), 60)
IPV4 = {"local": "10.0.0.5", "prefixlen": 24}
ROUTE = "default via 10.0.0.1 dev eth0 proto static \n"
UNCONFIGURED = '[{"mtu": 1500, "addr_info": []}]'

# Programs that log their arguments; `netplan apply` configures the port.
PROGRAMS = {
    "netplan": """
        [ "$1" = generate ] && exit $(cat $ROOT/generate-code 2>/dev/null || echo 0)
        if [ -e $ROOT/run/netplan/*.yaml ] || [ -e $ROOT/etc/netplan/*.yaml ]
        then echo '[{"mtu": 9000, "addr_info": [{"local": "192.168.100.11", "prefixlen": 24}]}]'
        else echo '[{"mtu": 1500, "addr_info": []}]'; fi > $ROOT/port""",
    "systemd-run": """case "$*" in *'netplan apply') netplan apply;; esac""",
    "ip": """
        case "$*" in
          *"-6 route show"*) cat $ROOT/routes6;;
          *"route show"*) cat $ROOT/routes;;
          *"show scope"*) cat $ROOT/others;;
          *show*) cat $ROOT/port;;
        esac""",
    "systemctl": """echo "Id=$(echo "$*" | sed 's/.* //')"; echo ActiveState=inactive""",
}


class Fabric:
    def __init__(self, root):
        self.root, self.paths = root, Paths(root)

    def write_program(self, name, text):
        script = f'echo "{name} $*" >> $ROOT/log\n{text}'.replace("$ROOT", str(self.root))
        write_program(self.root / "bin" / name, script)

    def write_others(self, *addresses):
        links = [{}, {"ifname": "eth0", "addr_info": [*addresses]}] if addresses else []
        (self.root / "others").write_text(json.dumps(links))

    def flush_others(self, queries):
        count = f"echo query >> $ROOT/queries; [ $(wc -l < $ROOT/queries) -gt {queries} ]"
        addresses = f"{{ {count} && cat $ROOT/others || echo '[]'; }}"
        self.write_program("ip", PROGRAMS["ip"].replace("cat $ROOT/others", addresses))

    def queries(self):
        return len((self.root / "queries").read_text().splitlines())

    def log(self):
        return (self.root / "log").read_text()

    def mtu(self):
        return int(json.loads((self.root / "port").read_text())[0]["mtu"])


@pytest.fixture
def host(tmp_path, monkeypatch):
    host = Fabric(tmp_path)
    for name, text in PROGRAMS.items():
        host.write_program(name, text)
    host.write_others(IPV4)
    for name, text in (("port", UNCONFIGURED), ("routes", ROUTE), ("routes6", "")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(fabric, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(fabric, "_SETTLE_TIME_S", 0.05)
    monkeypatch.setattr(fabric, "_REGAIN_TIMEOUT_S", 0.3)
    return host


def run(host, *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(to_json(PLAN)))
        assert fabric.set_addresses(list(words), host.paths) == 0


@pytest.fixture
def trial(host):
    run(host, "try")
    return host


def test_trial_is_temporary_and_its_removal_is_scheduled_before_it_starts(trial):
    assert trial.mtu() == 9000
    assert trial.paths.below(NETPLAN_TRIAL).stat().st_mode & 0o777 == 0o600
    assert not trial.paths.below(NETPLAN_FILE).exists()
    timer, apply = (line for line in trial.log().splitlines() if line.startswith("systemd-run"))
    assert "--on-active=60" in timer
    assert timer.endswith("fabric restore --unconfirmed")
    assert apply.endswith("netplan apply")


def test_rejects_a_second_trial(trial):
    before = trial.log()
    with pytest.raises(HostToolError, match="another trial is running"):
        run(trial, "try")
    assert trial.log() == before


def test_confirmed_network_settings_become_permanent(trial):
    run(trial, "confirm")
    run(trial, "confirm")
    run(trial, "restore", "--unconfirmed")
    assert trial.paths.below(NETPLAN_FILE).read_text() == PLAN.netplan
    assert trial.paths.below(NETPLAN_FILE).stat().st_mode & 0o777 == 0o600
    assert not trial.paths.below(NETPLAN_TRIAL).exists()


def test_confirmation_that_was_killed_keeps_its_addresses(trial):
    run(trial, "confirm")
    # It was killed before it removed this file and the timer.
    trial.paths.below(NETPLAN_TRIAL).write_text(PLAN.netplan)
    run(trial, "restore", "--unconfirmed")
    assert "address delete" not in trial.log()
    assert not trial.paths.below(NETPLAN_TRIAL).exists()


def test_removes_an_unconfirmed_trial(trial):
    run(trial, "restore", "--unconfirmed")
    assert trial.mtu() == 1500
    assert "ip address delete 192.168.100.11/24 dev fab0" in trial.log()
    assert "ip link set fab0 mtu 1500" in trial.log()
    for verb in ("confirm", "settled"):
        with pytest.raises(HostToolError, match="confirmed the new network in time"):
            run(trial, verb)


def test_lock_file_of_the_network_trial_is_private(trial):
    # A user who can read the file could lock it and prevent the restore.
    assert (trial.paths.run / "fabric.lock").stat().st_mode & 0o777 == 0o600


def test_power_cut_removes_the_trial(trial):
    shutil.rmtree(trial.paths.below("/run"))
    assert list(trial.paths.below("/etc").rglob("*")) == []
    with pytest.raises(HostToolError, match="confirmed the new network in time"):
        run(trial, "confirm")


@pytest.mark.parametrize(
    ("program", "text", "message"),
    [
        ("ip", PROGRAMS["ip"].replace("cat $ROOT/port", f"echo '{UNCONFIGURED}'"),
         "fab0 did not get 192.168.100.11/24 with MTU 9000"),
        ("systemctl", "echo Id=spark-fabric-apply.service; echo ActiveState=deactivating",
         "netplan did not finish"),
        ("ip", PROGRAMS["ip"].replace("cat $ROOT/others", """echo "[{\\"ifname\\": \\"eth0\\",
         \\"addr_info\\": [{\\"local\\": \\"10.0.0.$$\\", \\"prefixlen\\": 24}]}]" """),
         "addresses are still changing"),
    ],
    ids=["no address", "netplan hangs", "addresses change"],
)  # fmt: skip
def test_does_not_confirm_an_unsettled_network(trial, monkeypatch, program, text, message):
    monkeypatch.setattr(fabric, "_APPLY_TIMEOUT_S", 1.0)
    trial.write_program(program, text)
    with pytest.raises(HostToolError, match=message):
        run(trial, "confirm")
    assert not trial.paths.below(NETPLAN_FILE).exists()


def test_removes_a_rejected_netplan_file(host):
    (host.root / "generate-code").write_text("1")
    with pytest.raises(HostToolError, match="netplan rejects the file"):
        run(host, "try")
    assert not host.paths.below(NETPLAN_TRIAL).exists()
    assert "apply" not in host.log()


def test_restore_removes_the_netplan_file_and_keeps_a_copy(trial):
    run(trial, "confirm")
    with pytest.raises(HostToolError, match="already exists"):
        run(trial, "try")
    run(trial, "restore")
    run(trial, "restore")
    assert trial.mtu() == 1500
    assert not trial.paths.below(NETPLAN_FILE).exists()
    assert trial.paths.below("/var/lib/spark/fabric/removed.yaml").read_text() == PLAN.netplan


def test_restore_repairs_other_interfaces(trial):
    trial.write_others({"local": "192.168.100.11", "prefixlen": 24})
    (trial.root / "routes").write_text("")
    run(trial, "restore", "--unconfirmed")
    assert "ip address delete 192.168.100.11/24 dev eth0" in trial.log()
    assert "ip address replace 10.0.0.5/24 dev eth0" in trial.log()
    assert "ip -4 route replace default via 10.0.0.1 dev eth0 proto static" in trial.log()


def test_restores_static_ipv6_routes_but_not_advertised_routes(host):
    static = {"local": "fd00::5", "prefixlen": 64}
    temporary = {"local": "fd00::abcd", "prefixlen": 64, "temporary": True}
    host.write_others(IPV4, static, temporary, {})
    advertised = "default via fe80::9 dev eth0 proto ra metric 100 expires 1795sec pref medium\n"
    fixed = "default via fd00::1 dev eth0 metric 1024 pref medium \n"
    (host.root / "routes6").write_text(advertised + fixed)
    run(host, "try")
    host.write_others(IPV4)
    (host.root / "routes6").write_text(advertised)
    run(host, "restore", "--unconfirmed")
    assert [line for line in host.log().splitlines() if " replace " in line] == [
        "ip address replace fd00::5/64 dev eth0",
        "ip -6 route replace default via fd00::1 dev eth0 metric 1024 pref medium",
    ]


@pytest.mark.parametrize("words", [("settled",), ("restore", "--unconfirmed")])
def test_waits_for_addresses_to_return(trial, monkeypatch, words):
    trial.flush_others(queries=5)
    monkeypatch.setattr(fabric, "_SETTLE_TIME_S", 0.0)
    monkeypatch.setattr(fabric, "_REGAIN_TIMEOUT_S", 30.0)
    run(trial, *words)
    assert trial.queries() > 5
    assert "address replace" not in trial.log()


def test_network_counts_as_settled_if_an_address_never_returns(trial):
    trial.write_others()
    run(trial, "settled")


def test_restore_keeps_a_new_dhcp_lease(trial):
    trial.write_others({"local": "10.0.0.77", "prefixlen": 24})
    run(trial, "restore", "--unconfirmed")
    assert "dev eth0" not in trial.log()


def test_restores_addresses_if_netplan_fails(trial):
    trial.write_others()
    trial.write_program("netplan", "exit 1")
    with pytest.raises(HostToolError, match="netplan rejects the previous network"):
        run(trial, "restore", "--unconfirmed")
    assert "ip address replace 10.0.0.5/24 dev eth0" in trial.log()


TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def speed_request():
    return SpeedRequest("lo", "127.0.0.1", free_port(), TOKEN, 20_000_000, 2.0)


@contextmanager
def listening(speed_request):
    thread = threading.Thread(target=fabric.listen, args=(speed_request,), daemon=True)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive()


def test_speed_test_sends_exactly_the_requested_bytes(speed_request, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(to_json(speed_request)))
    with listening(speed_request):
        result = fabric.measure_speed(["send"], Paths("/"))
    assert isinstance(result, fabric.SpeedResult)
    assert result.arrived_bytes == speed_request.max_bytes
    assert 0 < result.took_s < speed_request.max_s
    with pytest.raises(HostToolError, match="listen` or `fabric-speed send"):
        fabric.measure_speed(["send", TOKEN], Paths("/"))


def test_speed_test_with_a_stalled_receiver_ends_at_the_time_limit(speed_request):
    slow = dataclasses.replace(speed_request, max_bytes=10**9, max_s=0.5)
    streams = []

    def receive_nothing():
        with socket.create_server((slow.address, slow.port)) as listener:
            streams.extend(listener.accept()[0] for _ in range(4))
            for stream in streams:
                stream.recv(len(TOKEN))
                stream.sendall(b"+")

    threading.Thread(target=receive_nothing, daemon=True).start()
    began = time.monotonic()
    result = fabric.send(slow)
    assert time.monotonic() - began < 30
    assert result.arrived_bytes < slow.max_bytes / 4
    assert result.took_s < 30


def test_speed_test_rejects_a_wrong_token(speed_request):
    with listening(speed_request):
        with connect_when_listening(speed_request.port) as stranger:
            stranger.sendall(b"x" * len(TOKEN))
            assert stranger.recv(1) == b""
        assert fabric.send(speed_request).arrived_bytes == speed_request.max_bytes


def test_slow_unauthenticated_client_does_not_end_the_measurement(speed_request):
    def trickle(stranger):
        with stranger, suppress(OSError):
            for _ in TOKEN:
                stranger.sendall(b"x")
                time.sleep(0.5)

    with listening(speed_request):
        threading.Thread(
            target=trickle, args=(connect_when_listening(speed_request.port),), daemon=True
        ).start()
        time.sleep(0.1)
        assert fabric.send(speed_request).arrived_bytes == speed_request.max_bytes


def test_speed_test_listens_only_on_the_fabric_address(speed_request):
    with listening(speed_request):
        connect_when_listening(speed_request.port).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", speed_request.port), 1)
        fabric.send(speed_request)


def test_speed_test_listener_times_out(speed_request, monkeypatch):
    monkeypatch.setattr(fabric, "_CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(HostToolError, match="0 of 4 connections"):
        fabric.listen(speed_request)


@pytest.mark.parametrize(
    ("interface", "message"),
    [("lo", r"lo to 127.0.0.1:\d+.*no connection.*firewall"), ("fab7", "No such device")],
)
def test_speed_test_reports_a_missing_listener_or_interface(
    speed_request, monkeypatch, interface, message
):
    monkeypatch.setattr(fabric, "_CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(HostToolError, match=message):
        fabric.send(dataclasses.replace(speed_request, interface=interface))
