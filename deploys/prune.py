"""Remove what no kept release needs: `--dry` shows each thing and its bytes.

What serves, what group_vars say, ``keep_ready`` and ``releases.keep`` earlier releases stay, and
everything that this project did not make.
"""

from pyinfra.context import host, state

from roles import prune
from spark_deploy.plan.keep import keep_of
from spark_deploy.plans import plan_for
from spark_deploy.ssh import no_delay

no_delay(state, host)
plan = plan_for(host)

prune.apply(keep=keep_of(plan), paths=plan.paths)
