"""Your Sparks. List them here; settings are in group_vars/spark.yml and host_vars/.

You can move this file to your own repository, next to group_vars/.
"""

import pathlib as _pathlib
import sys as _sys

# Only needed if the package is not installed.
_sys.path.insert(0, str(_pathlib.Path(__file__).resolve().parent.parent))

from spark_deploy.inventory import group_from as _group_from

spark = _group_from(
    "spark",
    hosts=[
        # Names that ssh can resolve, or any name with `ssh: {hostname: ...}` in
        # host_vars/<name>.yml; "@local" is this machine.
        "spark-1",
    ],
    file=__file__,
)
