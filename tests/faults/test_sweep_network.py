import itertools
import re
import signal
import time
from dataclasses import dataclass

import pytest
from spark_contract.fetching import PULL_STALL_S

from tests.faults.faulty_proxy import HOST, PORTS, Fault, FaultyProxy
from tests.faults.interruptions import Host
from tests.faults.sweep import GUESTS, Sweep
from tests.labkit import lab

ABOUT = {
    "hub": "model files have to be fetched; the old release serves",
    "registry": "the engine's image has to be pulled; required for serving",
    "packages": "a package of the vendor's repository has to be installed; the old release serves",
}
COUNTED = (
    "Permanent failures of the servers that a host uses. The owner's line is the deploy's own. "
    "Afterwards the server works again, and the next deploy succeeds without any help."
)
FEW_RETRIES = {"downloads": {"outage_s": 0}}
STATUSES = ("401", "403", "404", "429", "500", "502", "503")
LIMIT_S = 240  # of a deploy until it reports the failure
BODIES = ("truncated", "reset", "stall", "wrong bytes")
RESPONSES = ("no answer", "reset before", "redirect loop", "login page")


@dataclass(frozen=True)
class Service:
    """The command that makes a host need the server, and the requests that fail."""

    need: str
    match: str
    kinds: tuple[str, ...]
    body: str = ".*"  # paths of large answers, which can fail in the middle
    serves_on: bool = True


SERVICES = {
    "hub": Service(
        "find /srv/spark/sources -mindepth 1 -delete",
        ".*",
        (*STATUSES, *RESPONSES, *BODIES, "expired link"),
        r"^/blobs/",
    ),
    "registry": Service(
        "systemctl stop 'spark-serve@*'; docker images -q '*/lab/stub-engine' | sort -u "
        "| xargs docker rmi -f",
        "^/v2/",
        (*STATUSES, *RESPONSES, *BODIES),
        "/blobs/",
        serves_on=False,
    ),
    "packages": Service(
        "apt-get -qq -y purge nvidia-container-toolkit >/dev/null 2>&1; apt-get clean; "
        "rm -rf /var/lib/apt/lists/*",
        "^/vendor/",
        ("403", "404", "503", *RESPONSES, *BODIES, "badly signed", "stale"),
        r"\.deb$",
    ),
}
SPECIAL = {
    ("hub", "expired link"): Fault("403", r"^/blobs/"),
    ("packages", "badly signed"): Fault("wrong bytes", r"(InRelease|Release)$"),
    ("packages", "stale"): Fault("404", r"\.deb$"),
}


@pytest.fixture(scope="module")
def proxy():
    lab("up", *GUESTS, "--engine", "stub")
    proxy = FaultyProxy()
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def hosts(proxy, tmp_path_factory):
    hosts = [Host.start(name, tmp_path_factory.mktemp(name), {}) for name in GUESTS]
    for host in hosts:
        host.recreate()
        use_proxy(host)
        host.choose(**FEW_RETRIES)
        host.deploy()
    yield hosts
    for name in GUESTS:
        lab("down", name)


def use_proxy(host):
    inventory = host.site.root / "inventory/lab.py"
    text, read = inventory.read_text(), '_state.read_text(encoding="utf-8")'
    assert text.count(read) == 1
    replaced = "".join(f'.replace("{HOST}:{a}", "{HOST}:{b}")' for a, b in PORTS.items())
    inventory.write_text(text.replace(read, read + replaced))


def fail_and_repair(proxy, name, host, kind):
    service, guest = SERVICES[name], host.guest
    guest.run(service.need, timeout_s=200)
    before = guest.serving()
    fault = SPECIAL.get((name, kind)) or Fault(
        kind, service.body if kind in BODIES else service.match
    )
    with proxy.inject(guest.ip, fault):
        began = time.monotonic()
        stalls = name == "registry" and kind in ("stall", "no answer")
        limit_s = LIMIT_S + PULL_STALL_S * stalls
        run = host.site.deploy(timeout_s=limit_s)
        waited_s = time.monotonic() - began
        assert proxy.paths[guest.ip], "no request reached the faulty server"
    assert run.exit_code != 0, "the deploy succeeded"
    assert run.exit_code != -signal.SIGKILL, f"the deploy did not end within {limit_s:.0f} s"
    assert "Traceback" not in run.stderr, run.stderr[-3000:]
    if service.serves_on:
        assert before
        assert guest.serving() == before
        assert guest.answers()
    error = error_line(run.stderr)
    host.deploy()
    host.site.deploy().assert_unchanged()
    assert guest.answers()
    state = "the old release served on" if service.serves_on else "nothing served"
    return (
        error,
        f"{state}; reported after {waited_s:.0f} s; next run finished, second changed nothing",
    )


def error_line(output):
    """Return the line with the error: the fix is on the same line or on the next."""
    lines = [re.sub(r"^\s*\[lab-\d+\] *", "", line).strip() for line in output.splitlines()]
    own = [line for line in lines if "; fix: " in line or line.startswith("error: ")]
    above = [line for line, after in itertools.pairwise(lines) if after.startswith("fix: ")]
    errors = own or above
    assert errors, f"no error was printed:\n{output[-3000:]}"
    return re.sub(r"https?://\S*/|@sha256:\w+", "", errors[0].removeprefix("error: "))[:300]


@pytest.mark.parametrize("service", list(SERVICES))
def test_deploy_reports_failing_download_server_and_next_deploy_succeeds(proxy, hosts, service):
    sweep = Sweep("network")
    cases = {f"{service}: {kind}": kind for kind in SERVICES[service].kinds}
    sweep.run_group(
        service, cases, hosts, lambda host, case: fail_and_repair(proxy, service, host, cases[case])
    )
    listed = [f"{name}: {kind}" for name, about in SERVICES.items() for kind in about.kinds]
    sweep.write("Servers that fail", ABOUT, hosts[0].guest, COUNTED, listed=listed)
    sweep.assert_passed(service)
