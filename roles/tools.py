"""Install our host tools: the service tools, the builder and its pinned wheels."""

from __future__ import annotations

from collections.abc import Sequence

from pyinfra.api.deploy import deploy

from spark_deploy.hosts.facts.jobs import PythonSite
from spark_deploy.hosts.operations.files import look_at
from spark_deploy.hosts.operations.jobs import home_of, host_tools, python_site
from spark_deploy.hosts.operations.prefetch import expect
from spark_deploy.hosts.payload.content import ToolFiles
from spark_deploy.plan.machine import ToolsPlan
from spark_deploy.plan.managed_files import ManagedFile


@deploy("Tools")
def apply(*, plan: ToolsPlan, files: ToolFiles, units: Sequence[ManagedFile]) -> None:
    """Have the tools of ``plan.digest`` on the host and current."""
    look_at(file.path for file in (*files.installed(home_of(plan)), *units))
    expect(PythonSite)
    # First: a job that a boot or a person starts between the two would lack its packages.
    python_site(name="Install the builder's Python packages", plan=plan)
    host_tools(name="Install host tools", plan=plan, files=files, units=units)
