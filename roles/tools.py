"""Install the host tools and the pinned wheels of the checkpoint builder."""

from collections.abc import Sequence

from pyinfra.api import deploy

from spark_deploy.hosts.facts import expect_fact
from spark_deploy.hosts.files import expect_files
from spark_deploy.hosts.payload import PythonSite, install_site, install_tools, tool_files
from spark_deploy.plan.types import ManagedFile, PayloadIdentity


@deploy("Tools")
def apply(
    *, identity: PayloadIdentity, files: Sequence[ManagedFile], units: Sequence[ManagedFile]
) -> None:
    expect_files(file.path for file in (*tool_files(identity, files), *units))
    expect_fact(PythonSite)
    # The packages come first, because a job that starts in between would lack them.
    install_site(name="Install the builder's Python packages", identity=identity)
    install_tools(name="Install host tools", identity=identity, files=files, units=units)
