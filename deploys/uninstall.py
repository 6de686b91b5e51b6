"""Remove this project from hosts; `--dry` lists what would be removed and kept.

`--data uninstall.models=true` also removes models; `--data uninstall.engine=true` also removes
Docker and CUDA if a deploy installed them. Unmanaged files and packages stay.
"""

from pyinfra import host, state

from roles import setup
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.inventory.host_names import context_of

hold_lease(state, host)

setup.remove_all(settings=context_of(host).loaded.settings)
