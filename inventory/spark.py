"""Your Sparks. List them here; everything else is in group_vars/spark.yml and host_vars/.

This file may live in a repository of your own, with group_vars/ beside it.
"""

import pathlib as _pathlib
import sys as _sys

# For a checkout whose package is not installed; a repository of your own does not need it.
_sys.path.insert(0, str(_pathlib.Path(__file__).resolve().parent.parent))

from spark_deploy.inventory import group_from as _group_from

spark = _group_from(
    "spark",
    hosts=[
        # Names as ssh knows them, or any name with `ssh: {hostname: ...}` in host_vars/<name>.yml;
        # "@local" is the machine this runs on.
        "spark-1",
    ],
    file=__file__,
)
