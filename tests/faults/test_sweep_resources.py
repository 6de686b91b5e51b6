from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.interruptions import TIMEOUT_S, Host
from tests.faults.pause import Pause
from tests.faults.sweep import GUESTS, Sweep
from tests.faults.test_half_built import delete_unserved_checkpoints
from tests.faults.test_sweep_network import error_line
from tests.labkit import Guest, lab

ABOUT = {
    "before": "the host lacks it before a deploy",
    "during": "it disappears during the rollout",
}
COUNTED = (
    "Each time another release is chosen. The owner's line is the deploy's own. Guests share the "
    "clock of the machine's kernel: only the time of the host's Python programs is shifted."
)
Act = Callable[[Guest], Any]


def shell(command):
    return lambda guest: guest.run(command, timeout_s=200)


@dataclass(frozen=True)
class Lack:
    """How to take a resource from a host and give it back, and the settings of the deploy.

    ``succeeds`` is None if the deploy may succeed or fail.
    """

    take: Act
    give_back: Act
    choices: dict[str, Any] = field(default_factory=dict)
    succeeds: bool | None = False


def _commands(take, give_back, choices=None, **more):
    return Lack(shell(take), shell(give_back), choices or {}, **more)


def _full_disk(free_bytes, **choices):
    def fill(guest):
        lab("break", "disk-full", guest.name, "--value", str(free_bytes))

    return Lack(fill, lambda guest: lab("break", "disk-full", guest.name, "--heal"), choices)


_COPY = "cp -a {0} /run/kept && mount -t tmpfs -o {1} tmpfs {0} && cp -a /run/kept/. {0}/"
_NO_BYTE = "dd if=/dev/zero of={0}/filler bs=4k 2>/dev/null; ! echo x 2>/dev/null > {0}/filler2"
_NO_INODE = "i=0; while touch {0}/filler$i 2>/dev/null; do i=$((i+1)); done"
_FEW_INODES = "size=3g,nr_inodes=$(($(find {0} | wc -l) + 20))"


def _small_disk(path, options, fill, **choices):
    copy = _COPY.format(path, options.format(path))
    return _commands(f"{copy}; {fill.format(path)}", f"umount -l {path}; rm -rf /run/kept", choices)


def _read_only(path, **choices):
    mount = f"mount --bind {path} {path} && mount -o remount,bind,ro {path}"
    return _commands(mount, f"umount -l {path}", choices)


# Shifts the time in Python programs of the host by the seconds in a file, read at every call.
_CLOCK = """
import datetime, time
def _shift():
    try:
        return float(open("/run/clock-shift").read() or 0)
    except (OSError, ValueError):
        return 0.0
class _Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
    @classmethod
    def utcnow(cls):
        return cls.utcfromtimestamp(time.time())
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
datetime.datetime = _Shifted
"""
_SITE = "/usr/lib/python3/dist-packages/zz_clock"
_RESET_CLOCK = f"rm -f {_SITE}.* /run/clock-shift"
_YEAR_S = 366 * 86400


def _shift_clock(seconds):
    return (
        f"cat > {_SITE}.py <<'END'\n{_CLOCK}\nEND\necho import zz_clock > {_SITE}.pth; "
        f"echo {seconds} > /run/clock-shift; "
        "test $(python3 -Pc 'import datetime as d; print(int(d.datetime.now().timestamp()))') "
        f"-{'gt' if seconds > 0 else 'lt'} $(date +%s)"
    )


_LISTENER = (
    "systemd-run -q --unit stranger python3 -c 'import socket,time; s=socket.socket(); "
    's.setsockopt(1,2,1); s.bind(("0.0.0.0", 8010)); s.listen(); time.sleep(9999)\''
)
_STOP_STRANGER = "systemctl stop stranger; systemctl reset-failed stranger 2>/dev/null || :"
_LOCK_PACKAGES = (
    "apt-get -qq -y purge jq >/dev/null 2>&1; "
    "systemd-run -q --unit stranger python3 -c 'import fcntl,time; "
    'f=open("/var/lib/dpkg/lock-frontend","w"); fcntl.lockf(f,fcntl.LOCK_EX); time.sleep(9999)\''
)
# In a container, units with ProtectKernelTunables get a separate /proc without the mounted file, so
# an environment variable names it.
_NO_MEMORY = _commands(
    "sed 's/^MemAvailable:.*/MemAvailable:     100000 kB/' /proc/meminfo > /run/meminfo && "
    "mount --bind /run/meminfo /proc/meminfo; "
    "systemctl set-environment SPARK_MEMINFO=/run/meminfo",
    "umount -l /proc/meminfo; systemctl unset-environment SPARK_MEMINFO",
    {"memory": {"start_wait_s": 5}},
)
_PAUSE_DOCKER, _CONTINUE_DOCKER = (
    f"kill -{signal} $(systemctl show -p MainPID --value docker)" for signal in ("STOP", "CONT")
)
NATIVE = {"profile": "v2-native"}
CASES: dict[str, dict[str, Lack]] = {
    "before": {
        "the disk is full": _full_disk(65536, **NATIVE),
        "no byte left for records": _small_disk("/var/lib/spark", "size=3m", _NO_BYTE),
        "no inode left for records": _small_disk("/var/lib/spark", _FEW_INODES, _NO_INODE),
        "no inode left for models": _small_disk(
            "/srv/spark/models", _FEW_INODES, _NO_INODE, **NATIVE
        ),
        "records are on a read-only filesystem": _read_only("/var/lib/spark"),
        "models are on a read-only filesystem": _read_only("/srv/spark", **NATIVE),
        "/etc is read-only": _read_only("/etc"),
        "/tmp is full": _commands(
            "mount -t tmpfs -o size=4k tmpfs /tmp; " + _NO_BYTE.format("/tmp"),
            "umount -l /tmp",
            succeeds=True,
        ),
        "/run is full": _commands(
            "mount -o remount,size=$(($(df -k --output=used /run | tail -1) + 64))k /run; "
            + _NO_BYTE.format("/run"),
            "rm -f /run/filler /run/filler2; mount -o remount,size=20% /run",
        ),
        "the clock is a year ahead": _commands(_shift_clock(_YEAR_S), _RESET_CLOCK, succeeds=True),
        "the clock is a year behind": _commands(
            _shift_clock(-_YEAR_S), _RESET_CLOCK, succeeds=True
        ),
        "another program holds the package lock for ever": _commands(
            _LOCK_PACKAGES, _STOP_STRANGER, {"base": {"package_lock_wait_s": 8}}
        ),
        "another program holds the package lock for a while": _commands(
            f"{_LOCK_PACKAGES}; systemd-run -q --on-active=25 systemctl stop stranger",
            _STOP_STRANGER,
            succeeds=True,
        ),
        "docker is masked": _commands(
            "systemctl mask -q docker.service docker.socket; "
            "systemctl kill -s KILL docker; systemctl stop docker.socket docker",
            "systemctl unmask -q docker.service docker.socket; systemctl start docker",
        ),
        "docker hangs": _commands(_PAUSE_DOCKER, _CONTINUE_DOCKER),
        "another program uses the memory": _NO_MEMORY,
        "another program uses the port": _commands(
            _LISTENER, _STOP_STRANGER, {"serve": {"port": 8010}}
        ),
    },
    "during": {
        "the disk fills": _full_disk(4096),
        "docker hangs for 20 s": _commands(
            f"{_PAUSE_DOCKER}; systemd-run -q --on-active=20 sh -c '{_CONTINUE_DOCKER}'",
            _CONTINUE_DOCKER,
            succeeds=None,
        ),
        "docker dies": _commands(
            "systemctl kill -s KILL docker", "systemctl start docker", succeeds=None
        ),
        "the clock steps back by an hour": _commands(
            "echo 0 > /run/clock-shift", _RESET_CLOCK, succeeds=True
        ),
        "another program takes the memory": _NO_MEMORY,
    },
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    hosts = [Host.start(name, tmp_path_factory.mktemp(name), {}) for name in GUESTS]
    for host in hosts:
        host.recreate()
    yield hosts
    for name in GUESTS:
        lab("down", name)


def fail_and_repair(host, group, case):
    lack, guest = CASES[group][case], host.guest
    host.choose()
    host.deploy()
    guest.run("systemctl reset-failed 'spark-*' 2>/dev/null || :")
    delete_unserved_checkpoints(guest)
    before, invocation = guest.serving(), invocation_of(guest)
    host.choose(**{"profile": "v2-tq", **lack.choices})
    if group == "during":
        code, output = deploy_and_take(host, lack, case)
    else:
        try:
            lack.take(guest)
            run = host.site.deploy()
            code, output = run.exit_code, run.stderr
        finally:
            lack.give_back(guest)
    assert "Traceback" not in output, output[-3000:]
    assert lack.succeeds is None or (code == 0) == lack.succeeds, output[-3000:]
    saw = "nothing: the deploy succeeds" if code == 0 else error_line(output)
    if code != 0:
        same = invocation_of(guest) == invocation
        state = "the old release served on" if same else "the old release was started again"
        guest.wait(f"systemctl is-active {before[0]}", seconds=180)
        assert guest.answers()
        assert guest.boots() == before
    else:
        state = "the new release serves"
    host.site.deploy().assert_succeeded()
    host.site.deploy().assert_unchanged()
    assert guest.serving() != before
    port = lack.choices.get("serve", {}).get("port", 8000)
    assert guest.call("GET", "/v1/models", port=port)[0] == 200
    return saw, f"{state}; next run finished, second changed nothing"


def deploy_and_take(host, lack, case):
    guest = host.guest
    if "clock" in case:
        shell(_shift_clock(3600))(guest)
    try:
        with Pause.rollout(guest, "start", seconds=TIMEOUT_S) as pause:
            process = host.site.start("--limit", host.name)
            pause.wait(TIMEOUT_S + 20)
            lack.take(guest)
        output, _ = process.communicate(timeout=500)
        return process.returncode, output
    finally:
        lack.give_back(guest)


def invocation_of(guest):
    return guest.run(
        "systemctl list-units --plain --no-legend --state=active 'spark-serve@*' | cut -d' ' -f1 "
        "| xargs -r systemctl show -p InvocationID --value"
    )


@pytest.mark.parametrize("group", list(CASES))
def test_deploy_reports_exhausted_resource_and_next_deploy_succeeds(hosts, group):
    sweep = Sweep("resources")
    sweep.run_group(
        group, CASES[group], hosts, lambda host, case: fail_and_repair(host, group, case)
    )
    listed = [case for cases in CASES.values() for case in cases]
    sweep.write("What a host lacks", ABOUT, hosts[0].guest, COUNTED, listed=listed)
    sweep.assert_passed(group)
