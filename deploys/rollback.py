"""Back to the release that served before, or to one named with --data releases.rollback_to=NAME.

The change is the same as in a deploy: prepared, proven, and undone when its check fails. The next
``deploy.py`` goes to what group_vars say.
"""

from pyinfra.context import host, state

from roles import service
from spark_deploy.inventory.known import known_of
from spark_deploy.inventory.plans import waves_for
from spark_deploy.inventory.ssh import no_delay
from spark_deploy.planning.serving.gateway import SERVICE

no_delay(state, host)
settings = known_of(host).found.settings

service.rollback(
    service=SERVICE,
    to=settings.releases.rollback_to,
    timeout_s=settings.serve.start_timeout_s * 2 + 600,
    waves=waves_for(state),
)
