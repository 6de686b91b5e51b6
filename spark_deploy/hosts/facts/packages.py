"""Packages and their repositories; directories, files and units of the base role."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spark_deploy.hosts.facts import reading
from spark_deploy.hosts.facts.reading import FileStates, HostFact, Sections
from spark_deploy.plan.managed_files import FileState


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


# One call of systemctl for all units, whose answer is a block for each.
_TOLD = r"""
shown=$(systemctl show -p Id,UnitFileState,NeedDaemonReload,MainPID {units} 2>/dev/null)
told() {{
  printf '%s\n\n' "$shown" | awk -F= -v key="$1" -v units=" $* " '
    {{ of[$1] = $2 }}
    !NF {{ if (index(units, " " of["Id"] " ")) print of["Id"], of[key]; split("", of) }}'
}}
"""
_CARED_FOR = "user.slice system.slice ssh.service earlyoom.service"
_CARE = r"""
echo '== stale-units'; told NeedDaemonReload user.slice system.slice ssh.service
echo '== boot-target'; systemctl get-default
echo '== compaction'; cat /proc/sys/vm/compaction_proactiveness
echo '== earlyoom'
pid=$(told MainPID earlyoom.service | cut -d' ' -f2)
[ "${pid:-0}" != 0 ] && tr '\0' ' ' <"/proc/$pid/cmdline" | sed 's/^[^ ]* //; s/ *$//'; echo
"""


@dataclass(frozen=True, slots=True)
class Base:
    """State of the base role."""

    packages: dict[str, str]  # installed ones of those asked for
    directories: dict[str, tuple[str, str]]  # path: (mode "755", owner "root:root")
    files: dict[str, FileState]
    units: dict[str, str]  # unit: what is-enabled says ("masked", "static", ...)
    stale_units: tuple[str, ...]  # those whose files systemd has not read since they changed
    boot_target: str  # "graphical.target" | "multi-user.target"
    earlyoom: str  # arguments of the running earlyoom; "" when it does not run
    compaction_proactiveness: str  # of the running kernel


class BaseState(HostFact[Base]):
    """Everything the base role compares with its plan, in one command."""

    def command(
        self,
        packages: Sequence[str],
        directories: Sequence[str],
        files: Sequence[str],
        units: Sequence[str],
    ) -> str:
        places = " ".join(shlex.quote(path) for path in directories)
        names = " ".join(shlex.quote(unit) for unit in units)
        return reading.script(
            packages_script(packages),
            f"echo '== directories'; stat -L -c '%F|%a|%U:%G|%n' -- {places} 2>/dev/null",
            f"echo '== files'; {FileStates().command(files)}",
            _TOLD.format(units=f"{names} {_CARED_FOR}"),
            f"echo '== units'; told UnitFileState {names}",
            _CARE,
        )

    def process(self, output: list[str]) -> Base:
        found = reading.whole(output)
        return Base(
            packages=parse_packages(found.get("packages", ())),
            directories=parse_directories(found.get("directories", ())),
            files=FileStates().process(found.get("files", ())),
            stale_units=tuple(
                line.split()[0] for line in found.get("stale-units", ()) if line.endswith(" yes")
            ),
            boot_target=reading.first(found, "boot-target"),
            earlyoom=reading.first(found, "earlyoom"),
            compaction_proactiveness=reading.first(found, "compaction"),
            units=dict([*line.split(), ""][:2] for line in found.get("units", ()) if line.split()),
        )


def parse_directories(lines: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Read ``stat`` lines of directories; anything that is not one is left out."""
    found = {}
    for line in lines:
        kind, mode, owner, path = line.split("|", 3)
        if kind == "directory":
            found[path] = (mode, owner)
    return found
