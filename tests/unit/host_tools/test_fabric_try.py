"""A network between hosts is temporary until it is confirmed."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from spark_contract.documents import text_of
from spark_contract.errors import HostToolError
from spark_contract.fabric import NETPLAN_FILE, NETPLAN_TRIAL, FabricPlan, FabricPort
from spark_host.system import fabric_addresses as fabric
from stub_host import Paths

PORT = FabricPort("fab0", "192.168.100.11/24", 9000)
PLAN = FabricPlan("network: {version: 2}\n", (PORT,), 60)

# Programs that record their arguments; `netplan apply` configures the port.
NETPLAN = """#!/bin/sh
echo "netplan $*" >> $HERE/asked
[ "$1" = generate ] && exit $(cat $HERE/refuses 2>/dev/null || echo 0)
if [ -e $HERE/run/netplan/*.yaml ] || [ -e $HERE/etc/netplan/*.yaml ]
then echo '[{"mtu": 9000, "addr_info": [{"local": "192.168.100.11", "prefixlen": 24}]}]'
else echo '[{"mtu": 1500, "addr_info": []}]'; fi > $HERE/link
"""
SYSTEMD_RUN = """#!/bin/sh
echo "systemd-run $*" >> $HERE/asked
case "$*" in *'netplan apply') netplan apply;; esac
"""
IP = """#!/bin/sh
echo "ip $*" >> $HERE/asked
case "$*" in
  *"-6 route show"*) cat $HERE/routes6;;
  *"route show"*) cat $HERE/routes;;
  *"show scope"*) cat $HERE/others;;
  *show*) cat $HERE/link;;
esac
"""
SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >> $HERE/asked
printf 'Id=%s\nActiveState=inactive\n' "$(echo "$*" | sed 's/.* //')"
"""
OTHERS = '[{}, {"ifname": "eth0", "addr_info": [{"local": "10.0.0.5", "prefixlen": 24}]}]'
ROUTES = "default via 10.0.0.1 dev eth0 proto static \n"


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_ins = {"netplan": NETPLAN, "systemd-run": SYSTEMD_RUN, "ip": IP, "systemctl": SYSTEMCTL}
    for name, text in stand_ins.items():
        (programs / name).write_text(text.replace("$HERE", str(tmp_path)))
        (programs / name).chmod(0o755)
    (tmp_path / "link").write_text('[{"mtu": 1500, "addr_info": []}]')
    (tmp_path / "others").write_text(OTHERS)
    (tmp_path / "routes").write_text(ROUTES)
    (tmp_path / "routes6").write_text("")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(fabric, "_PAUSE_S", 0.01)
    monkeypatch.setattr(fabric, "_STILL_S", 0.05)
    monkeypatch.setattr(fabric, "_REGAIN_S", 0.3, raising=False)
    return Paths(tmp_path)


@pytest.fixture
def soon_over(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the time is to run out; elsewhere a busy machine has all of it."""
    monkeypatch.setattr(fabric, "_APPLY_S", 1.0)


def ask(paths: Paths, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text_of(PLAN)))
    assert fabric.main(list(words), paths) == 0


def mtu(paths: Paths) -> int:
    return int(json.loads((paths.root / "link").read_text())[0]["mtu"])


def asked(paths: Paths) -> str:
    return (paths.root / "asked").read_text()


def test_trial_is_temporary_and_its_end_is_scheduled_first(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(paths, monkeypatch, "try")
    assert mtu(paths) == 9000
    assert paths.below(NETPLAN_TRIAL).stat().st_mode & 0o777 == 0o600
    assert not paths.below(NETPLAN_FILE).exists()
    order = [line for line in asked(paths).splitlines() if line.startswith("systemd-run")]
    assert "--on-active=60" in order[0]
    assert order[0].endswith("fabric restore --unconfirmed")
    assert order[1].endswith("netplan apply")


def test_second_trial_is_refused(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    before = asked(paths)
    with pytest.raises(HostToolError, match="another trial is running"):
        ask(paths, monkeypatch, "try")
    assert asked(paths) == before
    ask(paths, monkeypatch, "restore", "--unconfirmed")
    assert mtu(paths) == 1500


def test_confirmed_trial_is_permanent(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    ask(paths, monkeypatch, "confirm")
    ask(paths, monkeypatch, "confirm")
    ask(paths, monkeypatch, "restore", "--unconfirmed")
    assert paths.below(NETPLAN_FILE).read_text() == PLAN.netplan
    assert paths.below(NETPLAN_FILE).stat().st_mode & 0o777 == 0o600
    assert not paths.below(NETPLAN_TRIAL).exists()


def test_unconfirmed_trial_is_removed(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    ask(paths, monkeypatch, "restore", "--unconfirmed")
    assert mtu(paths) == 1500
    assert "ip address delete 192.168.100.11/24 dev fab0" in asked(paths)
    assert "ip link set fab0 mtu 1500" in asked(paths)
    with pytest.raises(HostToolError, match="not confirmed in time"):
        ask(paths, monkeypatch, "confirm")


def test_lock_file_is_private(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    # A user who can read the file could lock it and prevent the restore.
    ask(paths, monkeypatch, "try")
    ask(paths, monkeypatch, "confirm")
    assert (paths.run / "fabric.lock").stat().st_mode & 0o777 == 0o600


def test_power_cut_removes_the_trial(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    shutil.rmtree(paths.below("/run"))
    assert list(paths.below("/etc").rglob("*")) == []
    with pytest.raises(HostToolError, match="not confirmed in time"):
        ask(paths, monkeypatch, "confirm")


@pytest.mark.usefixtures("soon_over")
def test_port_without_address_is_not_confirmed(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(paths, monkeypatch, "try")
    (paths.root / "link").write_text('[{"mtu": 1500, "addr_info": []}]')
    with pytest.raises(HostToolError, match=r"fab0 did not get 192.168.100.11/24 with MTU 9000"):
        ask(paths, monkeypatch, "confirm")
    assert not paths.below(NETPLAN_FILE).exists()


def test_rejected_netplan_file_is_removed(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    (paths.root / "refuses").write_text("1")
    with pytest.raises(HostToolError, match="netplan rejects the file"):
        ask(paths, monkeypatch, "try")
    assert not paths.below(NETPLAN_TRIAL).exists()
    assert "apply" not in asked(paths)


def test_restore_removes_the_network_and_keeps_a_copy(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(paths, monkeypatch, "try")
    ask(paths, monkeypatch, "confirm")
    with pytest.raises(HostToolError, match="another managed network is in use"):
        ask(paths, monkeypatch, "try")
    ask(paths, monkeypatch, "restore")
    ask(paths, monkeypatch, "restore")
    assert mtu(paths) == 1500
    assert not paths.below(NETPLAN_FILE).exists()
    assert paths.below("/var/lib/spark/fabric/removed.yaml").read_text() == PLAN.netplan
    assert asked(paths).count("netplan apply\n") == 3  # two by systemd-run, and another


def test_restore_repairs_other_interfaces(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(paths, monkeypatch, "try")
    broken = [{"ifname": "eth0", "addr_info": [{"local": "192.168.100.11", "prefixlen": 24}]}]
    (paths.root / "others").write_text(json.dumps(broken))
    (paths.root / "routes").write_text("")
    ask(paths, monkeypatch, "restore", "--unconfirmed")
    assert "ip address delete 192.168.100.11/24 dev eth0" in asked(paths)
    assert "ip address replace 10.0.0.5/24 dev eth0" in asked(paths)
    assert "ip -4 route replace default via 10.0.0.1 dev eth0 proto static" in asked(paths)
    assert "eth0 lost 10.0.0.5/24" in capsys.readouterr().out


def test_restores_static_ipv6_but_no_advertised_route(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = {"local": "10.0.0.5", "prefixlen": 24}
    six = {"local": "fd00::5", "prefixlen": 64}
    passing = {"local": "fd00::abcd", "prefixlen": 64, "temporary": True}
    (paths.root / "others").write_text(
        json.dumps([{"ifname": "eth0", "addr_info": [four, six, passing, {}]}])
    )
    advertised = "default via fe80::9 dev eth0 proto ra metric 100 expires 1795sec pref medium\n"
    fixed = "default via fd00::1 dev eth0 metric 1024 pref medium \n"
    (paths.root / "routes6").write_text(advertised + fixed)
    ask(paths, monkeypatch, "try")
    (paths.root / "others").write_text(json.dumps([{"ifname": "eth0", "addr_info": [four]}]))
    (paths.root / "routes6").write_text(advertised)
    ask(paths, monkeypatch, "restore", "--unconfirmed")
    changed = [line for line in asked(paths).splitlines() if " replace " in line]
    assert changed == [
        "ip address replace fd00::5/64 dev eth0",
        "ip -6 route replace default via fd00::1 dev eth0 metric 1024 pref medium",
    ]


def flush_for_a_while(paths: Paths, looks: int) -> None:
    late = "echo look >> $HERE/looks; [ $(wc -l < $HERE/looks) -gt $LOOKS ] || { echo '[]'; exit; }"
    (paths.root / "bin/ip").write_text(
        IP.replace("cat $HERE/others", f"{late}; cat $HERE/others")
        .replace("$HERE", str(paths.root))
        .replace("$LOOKS", str(looks))
    )


def test_settled_waits_for_other_interfaces(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    flush_for_a_while(paths, looks=5)
    monkeypatch.setattr(fabric, "_STILL_S", 0.0)
    monkeypatch.setattr(fabric, "_REGAIN_S", 30.0, raising=False)
    ask(paths, monkeypatch, "settled")
    assert len((paths.root / "looks").read_text().splitlines()) > 5


def test_settled_ignores_an_address_that_stays_missing(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(paths, monkeypatch, "try")
    (paths.root / "others").write_text("[]")
    ask(paths, monkeypatch, "settled")


def test_restore_adds_no_address_that_returns_by_itself(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(paths, monkeypatch, "try")
    flush_for_a_while(paths, looks=5)
    monkeypatch.setattr(fabric, "_REGAIN_S", 30.0, raising=False)
    ask(paths, monkeypatch, "restore", "--unconfirmed")
    assert "address replace" not in asked(paths)


def test_new_lease_is_not_replaced(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    renewed = [{"ifname": "eth0", "addr_info": [{"local": "10.0.0.77", "prefixlen": 24}]}]
    (paths.root / "others").write_text(json.dumps(renewed))
    ask(paths, monkeypatch, "restore", "--unconfirmed")
    assert "dev eth0" not in asked(paths).replace(ROUTES, "")


def test_not_settled_while_netplan_runs(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    at_work = (
        "#!/bin/sh\necho look >> $HERE/looks; now=deactivating\n"
        "[ $(wc -l < $HERE/looks) -gt 3 ] && now=inactive\n"
        'echo "Id=spark-fabric-apply.service"; echo "ActiveState=$now"\n'
    )
    (paths.root / "bin/systemctl").write_text(at_work.replace("$HERE", str(paths.root)))
    monkeypatch.setattr(fabric, "_STILL_S", 0.0)  # wait only for netplan
    ask(paths, monkeypatch, "settled")
    assert len((paths.root / "looks").read_text().splitlines()) > 3
    ask(paths, monkeypatch, "restore", "--unconfirmed")
    with pytest.raises(HostToolError, match="not confirmed in time"):
        ask(paths, monkeypatch, "settled")


@pytest.mark.usefixtures("soon_over")
def test_hanging_netplan_is_not_confirmed(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    at_work = "#!/bin/sh\necho Id=spark-fabric-apply.service; echo ActiveState=active\n"
    (paths.root / "bin/systemctl").write_text(at_work)
    with pytest.raises(HostToolError, match="netplan did not finish"):
        ask(paths, monkeypatch, "confirm")
    assert not paths.below(NETPLAN_FILE).exists()


@pytest.mark.usefixtures("soon_over")
def test_not_settled_while_addresses_change(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    (paths.root / "bin/ip").write_text(
        IP.replace(
            "cat $HERE/others",
            """echo '[{"ifname":"eth0","addr_info":[{"local":"10.0.0.'$$'","prefixlen":24}]}]'""",
        ).replace("$HERE", str(paths.root))
    )
    with pytest.raises(HostToolError, match="addresses still change"):
        ask(paths, monkeypatch, "settled")


def test_restores_addresses_if_netplan_fails(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(paths, monkeypatch, "try")
    (paths.root / "others").write_text("[]")
    (paths.root / "bin/netplan").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(HostToolError, match="netplan rejects the previous network"):
        ask(paths, monkeypatch, "restore", "--unconfirmed")
    assert "ip address replace 10.0.0.5/24 dev eth0" in asked(paths)
