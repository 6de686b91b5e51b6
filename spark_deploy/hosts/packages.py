"""Install packages and add repositories; driver, kernel and firmware are never changed.

apt 2.6 to 2.8: `-s` prints an `Inst` or `Remv` line for each changed package.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from time import monotonic

import gevent
from pyinfra import host
from pyinfra.api import FunctionCommand, Host, State
from spark_contract.units import UNITS_DIR

from spark_deploy.config.settings.sources import RepositorySettings
from spark_deploy.hosts.commands import (
    CommandError,
    heartbeat,
    is_planned,
    record_planned_change,
    run,
)
from spark_deploy.hosts.files import file_states
from spark_deploy.hosts.operations import Commands, fail, host_command
from spark_deploy.plan.types import FileState, ManagedFile


def packages_script(names: Sequence[str]) -> str:
    """Return a script that prints which of ``names`` are installed, or provided by a package."""
    return rf"""
echo '== packages'
dpkg-query -W -f '${{db:Status-Abbrev}}\t${{Package}}\t${{Version}}\t${{Provides}}\n' 2>/dev/null |
awk -F '\t' -v names={shlex.quote(" ".join(names))} '
  BEGIN {{ n = split(names, list, " "); for (i = 1; i <= n; i++) requested[list[i]] = 1 }}
  $1 ~ /^.i ?$/ {{
    if ($2 in requested) print $2 "\t" $3
    n = split($4, provided, /, */)
    for (i = 1; i <= n; i++) {{ sub(/ .*/, "", provided[i])
      if (provided[i] in requested && provided[i] != $2) print provided[i] "\t" $2 " " $3 }}
  }}'
"""


# Installed by deploys, which therefore repair an interrupted installation.
REPAIRABLE = r"docker|containerd|runc|nginx|(lib)?nvidia-container"

# dpkg-query(1): the second letter is the state, a third marks a package to reinstall.
INTERRUPTED_SCRIPT = rf"""
echo '== interrupted'
dpkg-query -W -f '${{db:Status-Abbrev}} ${{Package}}\n' 2>/dev/null |
awk '$1 ~ /^i/ && $1 !~ /^i[incWt]$/ && $2 ~ /^({REPAIRABLE})/ {{ print $2 }}'
"""


def parse_packages(lines: Iterable[str]) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in lines if "\t" in line)


def known_urls_script(urls: Sequence[str]) -> str:
    """Return a script that prints which of ``urls`` are in apt sources that we do not manage."""
    return rf"""
echo '== known-urls'
for url in {" ".join(map(shlex.quote, urls))}; do
  others=$(ls /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v /spark-)
  [ -n "$others" ] && grep -qsF -- "$url" $others && echo "$url"
done
"""


# Driver, kernel and firmware of a Spark must match: a partial update disables the GPU.
# libnvidia-container* and nvidia-container-toolkit* belong to docker and may change.
_PROTECTED = re.compile(
    r"nvidia-(driver|dkms|kernel|open|utils|compute-utils|firmware|settings|prime|modprobe|"
    r"fabricmanager|imex|persistenced|system)|"
    r"libnvidia-(compute|gl|cfg|common|decode|encode|extra|fbc|nscq|gpucomp)|"
    r"xserver-xorg-video-nvidia|cuda-drivers|nvswitch|dgx-|"
    r"linux-(image|modules|headers|nvidia|generic|firmware|oem|lowlatency|tools)|"
    r"(grub|shim|fwupd)"
)

_CHANGE = re.compile(r"(?:Inst|Remv)\s+(\S+)")

# With Acquire::Retries::Delay apt 2.6 hangs after a 503. With more retries each file of a dead
# server would take half a minute.
_APT = (
    "env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l APT_LISTCHANGES_FRONTEND=none "
    "apt-get -q -y -o DPkg::Lock::Timeout=120 -o Dpkg::Options::=--force-confold "
    "-o Acquire::Retries=1 -o Acquire::Retries::Delay=false"
)
# --reinstall is for packages that a power cut left half installed; --fix-broken skips some of them.
_INSTALL = "--no-install-recommends --reinstall install"
_UPDATE_TIMEOUT_S = 600
_LISTS = "/var/lib/apt/lists"


def forbidden_changes(simulation: Iterable[str]) -> tuple[str, ...]:
    """Return driver, kernel and firmware packages that ``apt-get -s`` would change."""
    names = (match[1] for match in map(_CHANGE.match, simulation) if match)
    return tuple(dict.fromkeys(name for name in names if _PROTECTED.match(name)))


def key_path(repository: RepositorySettings) -> str:
    """Return the path of a repository's key; the suffix tells apt whether it is armored."""
    suffix = "gpg" if repository.key_url.endswith(".gpg") else "asc"
    return f"/etc/apt/keyrings/spark-{repository.name}.{suffix}"


def sources_file(repository: RepositorySettings) -> ManagedFile:
    components = f"Components: {' '.join(repository.components)}\n" if repository.components else ""
    text = f"""\
# Managed by dgx-spark-deploy.
Types: deb
URIs: {repository.url}
Suites: {repository.suite}
{components}Signed-By: {key_path(repository)}
"""
    path = f"/etc/apt/sources.list.d/spark-{repository.name}.sources"
    return ManagedFile(path, text.encode())


def repository_files(repositories: Iterable[RepositorySettings]) -> tuple[str, ...]:
    return tuple(
        path
        for repository in repositories
        for path in (key_path(repository), sources_file(repository).path)
    )


def add_repositories(
    repositories: Sequence[RepositorySettings], known_urls: Sequence[str], *, needed: bool
) -> Commands:
    states, changed = file_states(repository_files(repositories)), False
    for repository in repositories:
        source, key = sources_file(repository), key_path(repository)
        if source.path not in states and (not needed or repository.url in known_urls):
            continue
        expected = {
            source.path: FileState(source.mode, "root:root", source.sha256),
            key: FileState(0o644, "root:root", repository.key_sha256),
        }
        differs = any(states.get(path) != state for path, state in expected.items())
        change = f"repository {repository.name}"
        if differs and not is_planned(change):
            record_planned_change(change)
            changed = True
            yield FunctionCommand(_add_repository, [repository], {})
    if not changed:
        host.noop("repositories are configured" if needed else "no package needs to be installed")


# Keys are downloaded through apt's proxy.
_APT_PROXY = """\
eval "$(apt-config shell http_proxy Acquire::http::Proxy https_proxy Acquire::https::Proxy)"
for v in http_proxy https_proxy; do
  eval "p=\\${$v:-}"; case $p in "") ;; DIRECT) unset "$v" ;; *) export "$v" ;; esac
done"""


@host_command
def _add_repository(state: State, host: Host, repository: RepositorySettings) -> bool:
    source = sources_file(repository)
    key, url = shlex.quote(key_path(repository)), shlex.quote(repository.key_url)
    target = shlex.quote(source.path)
    script = f"""
set -eu; umask 022; t=$(mktemp -p /run); trap 'rm -f "$t"' EXIT
{_APT_PROXY}
curl -fsSL --retry 3 --connect-timeout 20 --max-time 120 -o "$t" {url}
actual=$(sha256sum "$t" | cut -d' ' -f1)
[ "$actual" = {repository.key_sha256} ] || {{ echo "sha256=$actual"; exit 9; }}
install -D -m 644 "$t" {key}.spark-new; mv -fT {key}.spark-new {key}
cat > {target}.spark-new; mv -fT {target}.spark-new {target}
"""
    where = f"repository {repository.name}"
    try:
        run(host, script, stdin=source.content.decode().rstrip("\n"))
    except CommandError as failure:
        if received := re.search(r"sha256=(\w+)", failure.output):
            message = (
                f"not added: the key at {repository.key_url} has sha256 {received[1]}, "
                f"but {repository.key_sha256} is pinned"
            )
            fail(where, message, "ask the vendor whether the key changed, then set key_sha256")
        message = f"the repository cannot be added: {failure.output.strip() or failure}"
        fail(where, message, "check key_url and the host's network")
    return True


def install_command(
    packages: Sequence[str], lock_wait_s: int, quiet_services: Sequence[str] = ()
) -> FunctionCommand:
    """Return a command that installs packages.

    New services in ``quiet_services`` are neither started nor enabled.
    """
    return FunctionCommand(_install, [tuple(packages), lock_wait_s, tuple(quiet_services)], {})


@host_command
def _install(
    state: State,
    host: Host,
    packages: Sequence[str],
    lock_wait_s: int,
    quiet_services: Sequence[str],
) -> bool:
    names, quoted_names = " ".join(packages), " ".join(map(shlex.quote, packages))
    update_errors: list[str] = []
    try:
        wait_for_lock(host, lock_wait_s)
        with heartbeat(host, f"installing {names}"):
            output = run(host, update_script(), timeout_s=_UPDATE_TIMEOUT_S + 300)
            update_errors += (line for line in output if line.startswith(("E:", "W:", "Err:")))
            for line in update_errors:
                host.log(f"apt-get update: {line}")
            simulation = run(host, f"{_APT} -s {_INSTALL} {quoted_names}")
            if changes := forbidden_changes(simulation):
                message = (
                    f"not installed: {names} would change {', '.join(changes)}, "
                    "but a deploy never changes the driver, kernel or firmware"
                )
                fix = f"update the system with the vendor's tools, install {names}, then retry"
                fail("packages", message, fix)
            run(host, _install_script(quoted_names, quiet_services), timeout_s=3600)
    except CommandError as failure:
        tail = "\n".join(failure.output.strip().splitlines()[-12:])
        # A failed update often explains a missing package.
        errors = "".join(f"\napt-get update: {line}" for line in update_errors[-3:])
        fix = (
            "run `apt-get update`, check package names and repositories in the settings, "
            "and enable Ubuntu's universe repository"
        )
        fail("packages", f"cannot install {names}: {tail or failure}{errors}", fix)
    return True


def update_script(timeout_s: int = _UPDATE_TIMEOUT_S, lists: str = _LISTS) -> str:
    """Return a script that updates the package lists; after ``timeout_s`` it keeps the old lists.

    apt does not sync its lists. Lists that a power cut left empty look current to apt, so the
    script deletes them first.
    """
    files = f"find {lists} -maxdepth 1 -type f ! -name lock"
    return (
        f"{files} -empty -delete; timeout -k 10 {timeout_s} {_APT} update 2>&1; "
        f'case $? in 124 | 137) echo "E: not finished after {timeout_s} s" ;; esac; '
        f"{files} -exec sync {{}} + || :"
    )


# A unit that systemd generated from a removed package's init script may also be masked.
_MASK = """\
case $(systemctl show -p FragmentPath --value {name}) in
"" | /run/systemd/generator*) ln -s /dev/null {directory}/{name} && {mark}=yes ;;
esac"""
_UNMASK = """\
if [ -n "${mark}" ]; then
  rm -f {directory}/{name}; systemctl daemon-reload
  systemctl disable {name} 2>/dev/null
fi"""


def _install_script(names: str, quiet_services: Sequence[str]) -> str:
    """Return one script that installs packages, so that a lost connection cannot interrupt it.

    New services are masked during the installation, so that they do not start, then disabled.
    Existing units belong to the owner and are not changed.
    """
    units = [
        {"name": shlex.quote(service), "mark": f"masked_{number}", "directory": UNITS_DIR}
        for number, service in enumerate(quiet_services)
    ]
    return "\n".join(
        (
            *(_MASK.format(**unit) for unit in units),
            # After a power cut, apt requires this before it repairs the rest.
            f"env DEBIAN_FRONTEND=noninteractive dpkg --force-confold --configure {names} || :",
            f"{_APT} --no-remove {_INSTALL} {names}; rc=$?",
            *(_UNMASK.format(**unit) for unit in units),
            "exit $rc",
        )
    )


_LOCK_HOLDER = r"""
for lock in /var/lib/dpkg/lock-frontend /var/lib/dpkg/lock /var/lib/apt/lists/lock; do
  [ -e "$lock" ] || continue
  inode=$(stat -c %i "$lock")
  awk -v inode="$inode" '$2 == "POSIX" && $4 == "WRITE" {
    split($6, id, ":"); if (id[3] == inode) print $5 }' /proc/locks
done | sort -u | while read -r pid; do echo "$pid $(cat "/proc/$pid/comm" 2>/dev/null)"; done
"""


def wait_for_lock(host: Host, timeout_s: float) -> None:
    """Wait until no process holds the package lock; after a boot, apt's timers hold it."""
    started_s = monotonic()
    while holders := run(host, _LOCK_HOLDER, timeout_s=30):
        waited_s = monotonic() - started_s
        lock = f"the package lock, held by {', '.join(holders)}"
        if waited_s > timeout_s:
            fail("packages", f"waited {waited_s:.0f} s for {lock}", "stop that process, then retry")
        host.log(f"waiting for {lock} ({waited_s:.0f} s)")
        gevent.sleep(5)
