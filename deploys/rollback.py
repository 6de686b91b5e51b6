"""Back to the release that served before, or to one named with --data releases.rollback_to=NAME.

Without a name it is the main service that goes back; the name of a release tells its service.

The change is the same as in a deploy: prepared, proven, and undone when its check fails. The next
``deploy.py`` goes to what the settings say, unless `spark-deploy use` wrote the old choice there.
"""

from pyinfra.context import host, state
from spark_contract.release import service_of
from spark_contract.units import MAIN_SERVICE

from roles import service
from spark_deploy.hosts.lease import hold_lease
from spark_deploy.inventory.host_names import known_of
from spark_deploy.inventory.plans import waves_for

hold_lease(state, host)
settings = known_of(host).found.settings
to = settings.releases.rollback_to
goes = service_of(to) if to else MAIN_SERVICE
# A service that is listed no more has no choice; the main one's does not concern it.
chosen = settings if goes == MAIN_SERVICE else settings.services.get(goes)

service.rollback(
    service=goes,
    chosen=f"{chosen.model}/{chosen.profile}" if chosen else "none",
    to=to,
    timeout_s=settings.serve.start_timeout_s * 2 + 600,
    waves=waves_for(state),
)
