"""What is wrong with hosts only when they are seen together."""

from __future__ import annotations

from collections.abc import Mapping

from spark_deploy.errors import Problem
from spark_deploy.facts.machine.survey import Survey


def same_host_key(surveys: Mapping[str, Survey]) -> dict[str, Problem]:
    """Return a warning for each host that shows the SSH host key of another one.

    Hosts cloned from one disk do: whoever holds the key of one can pass for all of them.
    """
    by_key: dict[str, list[str]] = {}
    for name, survey in surveys.items():
        if survey.identity.host_key:
            by_key.setdefault(survey.identity.host_key, []).append(name)
    return {
        name: Problem(
            "SSH host key",
            f"is also that of {', '.join(other for other in names if other != name)}",
            "list it once, if it is one machine; else give each its own: "
            "`rm /etc/ssh/ssh_host_*; ssh-keygen -A; systemctl restart ssh` on it, then "
            "`ssh-keygen -R` its name here and run deploys/bootstrap.py",
        )
        for names in by_key.values()
        for name in names
        if len(names) > 1
    }
