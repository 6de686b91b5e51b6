import socket
import threading
from pathlib import Path

from lab.hub.faults import FaultSwitch
from lab.hub.server import Hub, make_servers
from lab.hub.store import Store


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RunningHub:
    def __init__(self, root: Path, run_dir: Path):
        port, cdn_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        hub = Hub(
            store=Store(root),
            faults=FaultSwitch(run_dir / "hub-fault.json"),
            cdn_url=f"http://127.0.0.1:{cdn_port}",
            access_log=run_dir / "hub-access.jsonl",
        )
        self.servers = make_servers(hub, "127.0.0.1", port, cdn_port)
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()
