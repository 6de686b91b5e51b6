"""Take this project off hosts: `--dry` shows what goes and what stays, with bytes.

Models stay unless `--data uninstall.models=true`; Docker and CUDA stay unless a deploy installed
them and `--data uninstall.engine=true`. What others made or installed is left alone.
"""

from pyinfra.context import host, state

from roles import uninstall
from spark_deploy.hosts.operations import lease
from spark_deploy.hosts.operations.uninstall import asked_of
from spark_deploy.inventory.host_names import known_of

lease.hold(state, host)

uninstall.apply(asked=asked_of(known_of(host).found.settings))
