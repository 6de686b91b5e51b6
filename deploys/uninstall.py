"""Remove this project from hosts; `--dry` lists removed and kept things.

Models stay unless `--data uninstall.models=true`. Docker and CUDA stay, unless a deploy installed
them and `--data uninstall.engine=true`. Unmanaged files and packages stay.
"""

from pyinfra import host, state

from roles import uninstall
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.hosts.uninstall import uninstall_request
from spark_deploy.inventory.host_names import context_of

hold_lease(state, host)

uninstall.apply(request=uninstall_request(context_of(host).loaded.settings))
