"""The times at which a host changes between releases by itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pyinfra.api.operation import operation
from pyinfra.context import host
from spark_contract.host.units import HOURS, UNITS_DIR

from spark_deploy.facts.memo import read
from spark_deploy.facts.service.schedule import Calendars, Timers
from spark_deploy.managed import ManagedFile
from spark_deploy.operations.files import place
from spark_deploy.operations.host_errors import Commands, host_errors, refuse


@operation()
@host_errors
def scheduled(times: Sequence[str], timers: Sequence[ManagedFile]) -> Commands:
    """Have exactly these timers: theirs run, those of earlier schedules are gone."""
    problem = host.get_fact(Calendars, times=tuple(times)) if times else ""
    if problem:
        refuse(
            f"{host.name}: schedule", problem, "`man systemd.time`; `systemd-analyze calendar TEXT`"
        )
    running = read(Timers)
    wanted = {file.path.rpartition("/")[2] for file in timers}
    gone = [name for name in running if name not in wanted]
    if gone:
        names = " ".join(map(shlex.quote, gone))
        paths = " ".join(shlex.quote(f"{UNITS_DIR}/{name}") for name in gone)
        yield f"systemctl disable --now {names}; rm -f {paths}; systemctl daemon-reload"
    changed = (yield from place(timers)) if timers else False
    idle = [name for name in sorted(wanted) if not running.get(name)]
    if changed or idle:
        names = " ".join(map(shlex.quote, sorted(wanted)))
        yield f"systemctl daemon-reload && systemctl enable {names} && systemctl restart {names}"
    if not (gone or changed or idle):
        host.noop(f"{len(wanted)} timers run ({HOURS.of('*')})" if wanted else "no schedule")
