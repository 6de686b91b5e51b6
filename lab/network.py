"""The lab's bridge and a network namespace per guest, without a route out of the machine."""

import json
from collections.abc import Sequence
from pathlib import Path

from lab.paths import BRIDGE, HOST_IP, PROXY_IP, guest_index, guest_ip
from lab.shell import run, succeeds


def _links() -> set[str]:
    return {entry["ifname"] for entry in json.loads(run(["ip", "-j", "link"]) or "[]")}


def namespace(name: str) -> Path:
    return Path("/run/netns") / _netns(name)


def _netns(name: str) -> str:
    return f"spark-{name}"


def _veth(name: str) -> str:
    return f"veth-{name}"


def ensure_bridge() -> None:
    if BRIDGE not in _links():
        run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    for address in (HOST_IP, PROXY_IP):
        run(["ip", "addr", "replace", f"{address}/24", "dev", BRIDGE])
    run(["ip", "link", "set", BRIDGE, "up"])


def remove_bridge() -> None:
    if BRIDGE in _links():
        run(["ip", "link", "del", BRIDGE])


def connect(name: str, *, proxied: bool = False) -> None:
    """Create the guest's namespace with eth0 on the bridge.

    A proxied guest has no route to the lab's servers; this machine uses the proxy's address.
    """
    disconnect(name)
    netns, veth = _netns(name), _veth(name)
    run(["ip", "netns", "add", netns])
    # A fixed address, because neighbors cache the previous address for half a minute.
    mac = f"02:53:50:4b:00:{guest_index(name):02x}"
    peer = ["peer", "name", "eth0", "address", mac, "netns", netns]
    run(["ip", "link", "add", veth, "type", "veth", *peer])
    run(["ip", "link", "set", veth, "master", BRIDGE, "up"])
    guest = guest_ip(guest_index(name))
    run(["ip", "-n", netns, "addr", "add", f"{guest}/24", "dev", "eth0"])
    for link in ("lo", "eth0"):
        run(["ip", "-n", netns, "link", "set", link, "up"])
    if proxied:
        run(["ip", "-n", netns, "route", "add", "prohibit", f"{HOST_IP}/32"])
        run(["ip", "route", "replace", guest, "dev", BRIDGE, "src", PROXY_IP])
    else:
        run(["ip", "-n", netns, "route", "add", "default", "via", HOST_IP])


def disconnect(name: str) -> None:
    if BRIDGE in _links():
        run(["ip", "route", "del", guest_ip(guest_index(name)), "dev", BRIDGE], check=False)
    if namespace(name).exists():
        run(["ip", "netns", "del", _netns(name)])
    if _veth(name) in _links():
        succeeds(["ip", "link", "del", _veth(name)])


def set_cable(name: str, *, plugged: bool) -> None:
    run(["ip", "link", "set", _veth(name), "up" if plugged else "down"])


def connect_ports(first: str, second: str, ports: Sequence[str]) -> None:
    """Connect the ports of two guests by veth pairs, which disappear with either guest."""
    ends = _netns(first), _netns(second)
    for port in ports:
        if not succeeds(["ip", "-n", ends[0], "link", "show", port]):
            peer = ["peer", "name", port, "netns", ends[1]]
            run(["ip", "-n", ends[0], "link", "add", port, "type", "veth", *peer])
        for end in ends:
            run(["ip", "-n", end, "link", "set", port, "up"])


def leftovers() -> list[str]:
    links = [link for link in _links() if link == BRIDGE or link.startswith("veth-lab-")]
    netns_dir = Path("/run/netns")
    names = [p.name for p in netns_dir.iterdir()] if netns_dir.exists() else []
    return sorted(links + [name for name in names if name.startswith("spark-lab-")])
