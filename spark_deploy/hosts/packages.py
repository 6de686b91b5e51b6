"""Packages and repositories, without ever touching driver, kernel or firmware."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import gevent
from pyinfra.api.command import FunctionCommand
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.context import host
from spark_contract.units import UNITS_DIR

from spark_deploy.config.settings.sources import RepositorySettings
from spark_deploy.hosts.commands import CommandFailed, heartbeat, is_predicted, predict, run
from spark_deploy.hosts.facts import FileStates, Sections
from spark_deploy.hosts.host_errors import Commands, host_command, refuse
from spark_deploy.plan.managed_files import FileState, ManagedFile


def packages_script(names: Sequence[str]) -> str:
    """List those of ``names`` that are installed, or provided by an installed package."""
    return rf"""
echo '== packages'
dpkg-query -W -f '${{db:Status-Abbrev}}\t${{Package}}\t${{Version}}\t${{Provides}}\n' 2>/dev/null |
awk -F '\t' -v names={shlex.quote(" ".join(names))} '
  BEGIN {{ n = split(names, list, " "); for (i = 1; i <= n; i++) wanted[list[i]] = 1 }}
  $1 ~ /^.i ?$/ {{
    if ($2 in wanted) print $2 "\t" $3
    n = split($4, provided, /, */)
    for (i = 1; i <= n; i++) {{ sub(/ .*/, "", provided[i])
      if (provided[i] in wanted && provided[i] != $2) print provided[i] "\t" $2 " " $3 }}
  }}'
"""


def parse_packages(lines: Iterable[str]) -> dict[str, str]:
    """Read the ``packages`` section: name to version (or to the provider and its version)."""
    return dict(line.split("\t", 1) for line in lines if "\t" in line)


@dataclass(frozen=True, slots=True)
class Repositories:
    """What apt of the host knows."""

    files: Mapping[str, FileState]  # our key and source files that exist
    known_urls: tuple[str, ...]  # repository addresses named in files that are not ours


def repositories_script(urls: Sequence[str], files: Sequence[str]) -> str:
    """Ask for our files, and for each address whether somebody else's source names it."""
    addresses = " ".join(shlex.quote(url) for url in urls)
    states = FileStates().command(files) if files else "true"
    return rf"""
echo '== repository-files'; {states}
echo '== known-urls'
for url in {addresses}; do
  others=$(ls /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v /spark-)
  [ -n "$others" ] && grep -qsF -- "$url" $others && echo "$url"
done
"""


def parse_repositories(sections: Sections) -> Repositories:
    """Read the sections of ``repositories_script``."""
    return Repositories(
        files=FileStates().process(sections.get("repository-files", ())),
        known_urls=tuple(sections.get("known-urls", ())),
    )


# A Spark's driver, kernel and firmware are one factory set; half a set leaves no GPU at all.
# libnvidia-container* and nvidia-container-toolkit* belong to docker and are not meant here.
_KEEP_OUT = re.compile(
    r"nvidia-(driver|dkms|kernel|open|utils|compute-utils|firmware|settings|prime|modprobe|"
    r"fabricmanager|imex|persistenced|system)|"
    r"libnvidia-(compute|gl|cfg|common|decode|encode|extra|fbc|nscq|gpucomp)|"
    r"xserver-xorg-video-nvidia|cuda-drivers|nvswitch|dgx-|"
    r"linux-(image|modules|headers|nvidia|generic|firmware|oem|lowlatency|tools)|"
    r"(grub|shim|fwupd)"
)


# Without the delay's option apt 2.6 waits for ever when a repository answers with a 503; for each
# file of a server that gives no answer it would wait half a minute, and three times more.
_APT = (
    "env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l APT_LISTCHANGES_FRONTEND=none "
    "apt-get -q -y -o DPkg::Lock::Timeout=120 -o Dpkg::Options::=--force-confold "
    "-o Acquire::Retries=1 -o Acquire::Retries::Delay=false"
)


_UPDATE_S = 600


def forbidden_changes(simulation: Iterable[str]) -> tuple[str, ...]:
    """Name the packages of driver, kernel or firmware that ``apt-get -s`` would change."""
    found = []
    for line in simulation:
        words = line.split()
        if len(words) > 1 and words[0] in ("Inst", "Remv") and _KEEP_OUT.match(words[1]):
            found.append(words[1])
    return tuple(dict.fromkeys(found))


def key_path(repository: RepositorySettings) -> str:
    """Where the repository's key lies; apt tells armoured from binary keys by the suffix."""
    suffix = "gpg" if repository.key_url.endswith(".gpg") else "asc"
    return f"/etc/apt/keyrings/spark-{repository.name}.{suffix}"


def sources_file(repository: RepositorySettings) -> ManagedFile:
    """Build the deb822 file that adds the repository, bound to its own key."""
    lines = [
        "# Managed by dgx-spark-deploy.",
        "Types: deb",
        f"URIs: {repository.url}",
        f"Suites: {repository.suite}",
        *([f"Components: {' '.join(repository.components)}"] if repository.components else []),
        f"Signed-By: {key_path(repository)}",
    ]
    path = f"/etc/apt/sources.list.d/spark-{repository.name}.sources"
    return ManagedFile(path, ("\n".join(lines) + "\n").encode())


def repository_files(repositories: Sequence[RepositorySettings]) -> tuple[str, ...]:
    """List the paths of keys and sources we own for these repositories."""
    return tuple(
        path
        for repository in repositories
        for path in (key_path(repository), sources_file(repository).path)
    )


def repositories_to_add(
    wanted: Sequence[RepositorySettings], state: Repositories, *, needed: bool
) -> tuple[RepositorySettings, ...]:
    """Pick the repositories that have to be added or repaired.

    One the host already knows by another file is left alone (apt refuses two keys for one
    source), and nothing is added as long as nothing has to be installed.
    """
    found = []
    for repository in wanted:
        source, key = sources_file(repository), key_path(repository)
        right = {
            source.path: FileState(source.mode, "root:root", source.sha256),
            key: FileState(0o644, "root:root", repository.key_sha256),
        }
        ours = source.path in state.files
        if not ours and (not needed or repository.url in state.known_urls):
            continue
        wrong = any(state.files.get(path) != expected for path, expected in right.items())
        if wrong and not is_predicted(f"repository {repository.name}"):
            predict(f"repository {repository.name}")
            found.append(repository)
    return tuple(found)


def add_repositories(
    wanted: Sequence[RepositorySettings], state: Repositories, *, needed: bool
) -> Commands:
    """Have the repositories on the host where packages have to be installed from them."""
    wrong = repositories_to_add(wanted, state, needed=needed)
    if not wrong:
        host.noop("repositories are as planned" if needed else "nothing has to be installed")
    for repository in wrong:
        yield FunctionCommand(_add_repository, [repository], {})


# The key of a repository comes the way its packages come: through the proxy that apt was told.
_APT_PROXY = """\
eval "$(apt-config shell http_proxy Acquire::http::Proxy https_proxy Acquire::https::Proxy)"
for v in http_proxy https_proxy; do
  eval "p=\\${$v:-}"; case $p in "") ;; DIRECT) unset "$v" ;; *) export "$v" ;; esac
done"""


@host_command
def _add_repository(state: State, host: Host, repository: RepositorySettings) -> bool:
    """Fetch the key, check it against its pin and add the source."""
    source = sources_file(repository)
    key, url = shlex.quote(key_path(repository)), shlex.quote(repository.key_url)
    put = shlex.quote(source.path)
    script = f"""
set -eu; umask 022; t=$(mktemp); trap 'rm -f "$t"' EXIT
{_APT_PROXY}
curl -fsSL --retry 3 --connect-timeout 20 --max-time 120 -o "$t" {url}
got=$(sha256sum "$t" | cut -d' ' -f1)
[ "$got" = {repository.key_sha256} ] || {{ echo "sha256=$got"; exit 9; }}
install -D -m 644 "$t" {key}.spark-new; mv -fT {key}.spark-new {key}
cat > {put}.spark-new; mv -fT {put}.spark-new {put}
"""
    where = f"repository {repository.name}"
    try:
        run(host, script, stdin=source.content.decode().rstrip("\n"))
    except CommandFailed as failure:
        seen = re.search(r"sha256=(\w+)", failure.output)
        if seen:
            refuse(
                where,
                f"the key at {repository.key_url} has sha256 {seen.group(1)}, "
                f"not the pinned {repository.key_sha256}; nothing was added",
                "find out whether the vendor changed the key, then set key_sha256",
            )
        what = f"cannot add it: {failure.output.strip() or failure}"
        refuse(where, what, "check key_url and the host's network")
    return True


def install(
    packages: Sequence[str], lock_wait_s: int, quiet_services: Sequence[str] = ()
) -> FunctionCommand:
    """Build the command that installs packages which are missing.

    Args:
        packages: names to install.
        lock_wait_s: how long others who install packages are waited for.
        quiet_services: services of these packages that must not start or be enabled.
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
    listed, missed = " ".join(packages), list[str]()
    try:
        wait_for_lock(host, lock_wait_s)
        with heartbeat(host, f"installing {listed}"):
            missed += _update(host)
            _install_missing(host, packages, quiet_services)
    except CommandFailed as failure:
        tail = "\n".join(failure.output.strip().splitlines()[-12:])
        # Why a package is not to be found stands in what could not be fetched before.
        why = "".join(f"\napt-get update: {line}" for line in missed[-3:])
        refuse(
            "packages",
            f"cannot install {listed}: {tail or failure}{why}",
            "check the package names, the repositories in group_vars, universe on Ubuntu, and "
            "`apt-get update`",
        )
    return True


def _install_missing(host: Host, packages: Sequence[str], quiet_services: Sequence[str]) -> None:
    """Install what is missing, unless that would touch the driver."""
    names = " ".join(shlex.quote(package) for package in packages)
    changed = forbidden_changes(run(host, f"{_APT} -s --no-install-recommends install {names}"))
    if changed:
        refuse(
            "packages",
            f"installing {' '.join(packages)} would change {', '.join(changed)}; "
            "driver, kernel and firmware are never ours to change; nothing was installed",
            f"install {' '.join(packages)} by hand after the vendor's update, then run again",
        )
    run(host, _install_script(names, quiet_services), timeout_s=3600)


def _update(host: Host) -> list[str]:
    """Refresh the lists; a vendor's broken source must not stop packages of the others.

    Returns what apt says went wrong, which is told as well.
    """
    said = run(host, update_script(), timeout_s=_UPDATE_S + 300)
    wrong = [line for line in said if line.startswith(("E:", "W:", "Err:"))]
    for line in wrong:
        host.log(f"apt-get update: {line}")
    return wrong


_LISTS = "/var/lib/apt/lists"


def update_script(limit_s: int = _UPDATE_S, lists: str = _LISTS) -> str:
    """Return what refreshes the lists; what does not end is ended, and the old ones are used.

    apt does not sync what it fetched: a power cut leaves lists of no length, with a date by which
    the repository says that they are current. Empty ones are dropped first, new ones are synced.
    """
    files = f"find {lists} -maxdepth 1 -type f ! -name lock"
    return (
        f"{files} -empty -delete; timeout -k 10 {limit_s} {_APT} update 2>&1; "
        f'case $? in 124 | 137) echo "E: it did not end within {limit_s} s" ;; esac; '
        f"{files} -exec sync {{}} + || :"
    )


# A unit made of a script that a removed package left behind is nobody's.
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
    """Install in one script on the host, so that a lost connection cannot stop it half way.

    A masked unit is not started by its package; the mask goes again at once, and the enabling
    that packages do by default with it. A unit that the host has already is its owner's: such a
    one is neither masked nor disabled.
    """
    quiet = [shlex.quote(service) for service in quiet_services]
    each = [
        {"name": name, "mark": f"masked_{number}", "directory": UNITS_DIR}
        for number, name in enumerate(quiet)
    ]
    lines = [_MASK.format(**words) for words in each]
    lines.append(f"{_APT} --no-install-recommends --no-remove install {names}; rc=$?")
    lines += [_UNMASK.format(**words) for words in each]
    lines.append("exit $rc")
    return "\n".join(lines)


_LOCK_HOLDER = r"""
for lock in /var/lib/dpkg/lock-frontend /var/lib/dpkg/lock /var/lib/apt/lists/lock; do
  [ -e "$lock" ] || continue
  inode=$(stat -c %i "$lock")
  awk -v inode="$inode" '$2 == "POSIX" && $4 == "WRITE" {
    split($6, id, ":"); if (id[3] == inode) print $5 }' /proc/locks
done | sort -u | while read -r pid; do echo "$pid $(cat "/proc/$pid/comm" 2>/dev/null)"; done
"""


def wait_for_lock(host: Host, limit_s: float) -> None:
    """Wait until nobody else installs packages (apt timers run after boot), saying who does."""
    started = monotonic()
    while holders := run(host, _LOCK_HOLDER, timeout_s=30):
        waited = monotonic() - started
        if waited > limit_s:
            what = f"the package lock is held by {', '.join(holders)} for {waited:.0f} s"
            refuse("packages", what, "wait for it or end it, then run again")
        host.log(f"waiting for the package lock, held by {', '.join(holders)}: {waited:.0f} s")
        gevent.sleep(5)
