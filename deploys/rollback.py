"""Roll back to the previous release, or to --data releases.rollback_to=NAME.

Without a name the main service is rolled back. The next ``deploy.py`` applies the settings again,
unless `spark-deploy use` selects the old model first.
"""

from pyinfra import host, state
from spark_contract.release import parse_service
from spark_contract.units import MAIN_SERVICE

from roles import service
from spark_deploy.hosts.operations import hold_lease
from spark_deploy.inventory.host_names import context_of
from spark_deploy.inventory.plans import waves_for

hold_lease(state, host)
settings = context_of(host).loaded.settings
target = settings.releases.rollback_to
name = parse_service(target) if target else MAIN_SERVICE
# A service that is no longer listed has no settings.
configured = settings if name == MAIN_SERVICE else settings.services.get(name)

service.rollback(
    service=name,
    configured_selection=f"{configured.model}/{configured.profile}" if configured else "none",
    target=target,
    timeout_s=settings.serve.start_timeout_s * 2 + 600,
    waves=waves_for(state),
)
