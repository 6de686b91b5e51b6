"""What a host lacks while it is changed: one line says it, the old release serves, and it heals."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.faults.hold import Hold
from tests.faults.killing import HELD_S, QUESTION, Place
from tests.faults.sweep import GUESTS, Sweep, all_well, side_by_side
from tests.faults.test_sweep_network import line_of_text
from tests.labkit import Guest, lab

ABOUT = {"before": "the host lacks it before a deploy", "during": "it goes during the rollout"}
COUNTED = (
    "Each time another release is chosen. The owner's line is the deploy's own. Guests share the "
    "clock of the machine's kernel: only what Python programs of the host read is shifted."
)
Act = Callable[[Guest], Any]


def shell(command: str) -> Act:
    """Return what runs a command on the guest."""
    return lambda guest: guest.run(command, timeout_s=200)


def fault(what: str, *words: str, heal: bool = False) -> Act:
    """Return what breaks or heals with ``lab break``."""
    return lambda guest: lab("break", what, guest.name, *words, *(["--heal"] if heal else []))


# A file system of its own below a folder, with what lay there.
_KEPT = "cp -a {0} /run/kept && mount -t tmpfs -o {1} tmpfs {0} && cp -a /run/kept/. {0}/"
_BACK = (
    "cp -a {0}/. /run/kept/ 2>/dev/null; umount -l {0} && cp -a /run/kept/. {0}/; rm -rf /run/kept"
)


def _small(path: str, options: str, fill: str) -> tuple[Act, Act]:
    return shell(f"{_KEPT.format(path, options)}; {fill}"), shell(
        f"umount -l {path}; rm -rf /run/kept"
    )


_NO_BYTE = "dd if=/dev/zero of={0}/filler bs=4k 2>/dev/null; ! echo x 2>/dev/null > {0}/filler2"
_NO_INODE = "i=0; while touch {0}/filler$i 2>/dev/null; do i=$((i+1)); done"
_FEW_INODES = "size=3g,nr_inodes=$(($(find {0} | wc -l) + 20))"
_READ_ONLY = "mount --bind {0} {0} && mount -o remount,bind,ro {0}"
# What Python programs of the host take for the time, in seconds from now; read at every look.
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
_YEAR_S = 366 * 86400


def _clock(seconds: int) -> tuple[Act, Act]:
    put = (
        f"cat > {_SITE}.py <<'END'\n{_CLOCK}\nEND\necho import zz_clock > {_SITE}.pth; "
        f"echo {seconds} > /run/clock-shift; "
        "test $(python3 -Pc 'import datetime as d; print(int(d.datetime.now().timestamp()))') "
        f"-{'gt' if seconds > 0 else 'lt' if seconds < 0 else 'ge'} $(date +%s)"
    )
    return shell(put), shell(f"rm -f {_SITE}.* /run/clock-shift")


_STRANGER = (
    "systemd-run -q --unit stranger python3 -c 'import socket,time; s=socket.socket(); "
    's.setsockopt(1,2,1); s.bind(("0.0.0.0", {0})); s.listen(); time.sleep(9999)\''
)
_NO_STRANGER = "systemctl stop stranger; systemctl reset-failed stranger 2>/dev/null || :"
_LOCKED = (
    "systemd-run -q --unit stranger python3 -c 'import fcntl,time; "
    'f=open("/var/lib/dpkg/lock-frontend","w"); fcntl.lockf(f,fcntl.LOCK_EX); time.sleep(9999)\''
)
# In a container units with ProtectKernelTunables get a /proc of their own, without what is mounted
# over its files: these are told of the file.
_MEMORY = (
    "sed 's/^MemAvailable:.*/MemAvailable:     100000 kB/' /proc/meminfo > /run/meminfo && "
    "mount --bind /run/meminfo /proc/meminfo; "
    "systemctl set-environment SPARK_MEMINFO=/run/meminfo"
)
_MEMORY_BACK = "umount -l /proc/meminfo; systemctl unset-environment SPARK_MEMINFO"
_HELD = "kill -{0} $(systemctl show -p MainPID --value docker)"


@dataclass(frozen=True)
class Lack:
    """One thing that a host lacks."""

    take: Act
    give: Act
    choices: dict[str, Any] = field(default_factory=dict)
    # True: the owner sees nothing of it, or that it was waited for; None: either may be.
    goes_well: bool | None = False


def _disk(options: str, fill: str, path: str) -> Lack:
    return Lack(*_small(path, options.format(path), fill.format(path)))


NATIVE = {"profile": "v2-native"}  # has a tree of its own, that has to be built
CASES: dict[str, dict[str, Lack]] = {
    "before": {
        "the disk is full": Lack(
            fault("disk-full", "--value", "65536"), fault("disk-full", heal=True), NATIVE
        ),
        "no byte left for records": _disk("size=3m", _NO_BYTE, "/var/lib/spark"),
        "no inode left for records": _disk(_FEW_INODES, _NO_INODE, "/var/lib/spark"),
        "no inode left for models": Lack(
            *_small(
                "/srv/spark/models",
                _FEW_INODES.format("/srv/spark/models"),
                _NO_INODE.format("/srv/spark/models"),
            ),
            NATIVE,
        ),
        "records are on a read-only filesystem": Lack(
            shell(_READ_ONLY.format("/var/lib/spark")), shell("umount -l /var/lib/spark")
        ),
        "models are on a read-only filesystem": Lack(
            shell(_READ_ONLY.format("/srv/spark")), shell("umount -l /srv/spark"), NATIVE
        ),
        "/etc is read-only": Lack(shell(_READ_ONLY.format("/etc")), shell("umount -l /etc")),
        "/tmp is full": Lack(
            shell("mount -t tmpfs -o size=4k tmpfs /tmp; " + _NO_BYTE.format("/tmp")),
            shell("umount -l /tmp"),
            goes_well=True,
        ),
        "/run is full": Lack(
            shell(
                "mount -o remount,size=$(($(df -k --output=used /run | tail -1) + 64))k /run; "
                + _NO_BYTE.format("/run")
            ),
            shell("rm -f /run/filler /run/filler2; mount -o remount,size=20% /run"),
        ),
        "the clock is a year ahead": Lack(*_clock(_YEAR_S), goes_well=True),
        "the clock is a year behind": Lack(*_clock(-_YEAR_S), goes_well=True),
        "others install packages for longer than is waited": Lack(
            shell(f"apt-get -qq -y purge jq >/dev/null 2>&1; {_LOCKED}"),
            shell(_NO_STRANGER),
            {"base": {"package_lock_wait_s": 8}},
        ),
        "others install packages for a while": Lack(
            shell(
                f"apt-get -qq -y purge jq >/dev/null 2>&1; {_LOCKED}; "
                "systemd-run -q --on-active=25 systemctl stop stranger"
            ),
            shell(_NO_STRANGER),
            goes_well=True,
        ),
        "docker is masked": Lack(
            shell(
                "systemctl mask -q docker.service docker.socket; "
                "systemctl kill -s KILL docker; systemctl stop docker.socket docker"
            ),
            shell("systemctl unmask -q docker.service docker.socket; systemctl start docker"),
        ),
        "docker hangs": Lack(shell(_HELD.format("STOP")), shell(_HELD.format("CONT"))),
        "a stranger holds the memory": Lack(
            shell(_MEMORY), shell(_MEMORY_BACK), {"memory": {"start_wait_s": 5}}
        ),
        "a stranger has the port": Lack(
            shell(_STRANGER.format(8010)), shell(_NO_STRANGER), {"serve": {"port": 8010}}
        ),
    },
    "during": {
        "the disk fills": Lack(
            fault("disk-full", "--value", "4096"), fault("disk-full", heal=True)
        ),
        "docker hangs for 20 s": Lack(
            shell(
                f"{_HELD.format('STOP')}; systemd-run -q --on-active=20 sh -c '"
                f"{_HELD.format('CONT')}'"
            ),
            shell(_HELD.format("CONT")),
            goes_well=None,
        ),
        "docker dies": Lack(
            shell("systemctl kill -s KILL docker"), shell("systemctl start docker"), goes_well=None
        ),
        "the clock steps back by an hour": Lack(
            shell("echo 0 > /run/clock-shift"), _clock(0)[1], goes_well=True
        ),
        "a stranger takes the memory": Lack(
            shell(_MEMORY), shell(_MEMORY_BACK), {"memory": {"start_wait_s": 5}}
        ),
    },
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Place]]:
    made = [Place.on(name, tmp_path_factory.mktemp(name), {}) for name in GUESTS]
    for place in made:
        place.begins_anew()
    yield made
    for name in GUESTS:
        lab("down", name)


def lacks(place: Place, group: str, case: str) -> tuple[str, str]:
    """Deploy while a host lacks something, and again when it is there."""
    lack, guest = CASES[group][case], place.guest
    place.choose()
    place.deploys()
    guest.run(
        "systemctl reset-failed 'spark-*' 2>/dev/null; "
        "find /srv/spark/models -mindepth 1 -maxdepth 1 ! -path "
        f"{tree_of(guest)} -exec rm -rf {{}} +"
    )
    before, invocation = guest.serving(), run_of(guest)
    place.choose(**{"profile": "v2-tq", **lack.choices})
    if group == "during":
        code, said = taken_during(place, lack, case)
    else:
        try:
            lack.take(guest)
            run = place.site.deploy()
            code, said = run.exit_code, run.stderr
        finally:
            lack.give(guest)
    assert "Traceback" not in said, said[-3000:]
    assert lack.goes_well is None or (code == 0) == lack.goes_well, said[-3000:]
    saw = "nothing: the deploy goes well" if code == 0 else line_of_text(said)
    if code != 0:
        same = run_of(guest) == invocation
        state = "the old release served on" if same else "the old release was started again"
        guest.wait(f"systemctl is-active {before[0]}", seconds=180)
        assert guest.answers(*QUESTION)
        assert guest.boots() == before
    else:
        state = "the new release serves"
    finished = place.site.deploy()
    assert finished.exit_code == 0, f"{finished.failed}\n{finished.stderr[-3000:]}"
    place.site.deploy().must_have_changed_nothing()
    assert guest.serving() != before
    assert (
        guest.call("GET", "/v1/models", port=lack.choices.get("serve", {}).get("port", 8000))[0]
        == 200
    )
    return saw, f"{state}; next run finished, the one after changed nothing"


def taken_during(place: Place, lack: Lack, case: str) -> tuple[int, str]:
    """Take something away while the candidate starts."""
    guest = place.guest
    if "clock" in case:
        _clock(3600)[0](guest)
    try:
        with Hold.switch(guest, "start", seconds=HELD_S) as hold:
            process = place.site.start("--limit", place.name)
            hold.wait(HELD_S + 20)
            lack.take(guest)
        said, _ = process.communicate(timeout=500)
        return process.returncode, said
    finally:
        lack.give(guest)


def tree_of(guest: Guest) -> str:
    release = guest.json(f"cat /etc/spark/releases/{guest.release()}/release.json")
    return shlex.quote(str(release["tree"]["path"]))


def run_of(guest: Guest) -> str:
    """Return which run of a serve unit serves, by systemd's word."""
    return guest.run(
        "systemctl list-units --plain --no-legend --state=active 'spark-serve@*' | cut -d' ' -f1 "
        "| xargs -r systemctl show -p InvocationID --value"
    )


@pytest.mark.parametrize("group", list(CASES))
def test_what_a_host_lacks_costs_a_line_and_the_next_run_heals(
    places: list[Place], group: str
) -> None:
    sweep = Sweep("resources")
    side_by_side(
        places,
        sweep.open_cases(group, CASES[group]),
        lambda place, case: sweep.tried(group, case, partial(lacks, place, group, case)),
    )
    listed = [case for cases in CASES.values() for case in cases]
    sweep.write("What a host lacks", ABOUT, places[0].guest, COUNTED, listed=listed)
    all_well(row for row in sweep.rows() if row.group == group)
