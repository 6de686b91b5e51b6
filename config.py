"""What pyinfra reads before the inventory, where it is started: refuse one that does not exist.

Copy it into a repository of your own, beside where you call pyinfra.
"""

import pathlib as _pathlib
import sys as _sys

# For a checkout whose package is not installed; a repository of your own does not need it.
_sys.path.insert(0, str(_pathlib.Path(__file__).resolve().parent))

from spark_deploy.inventory import check_inventory as _check_inventory

_check_inventory()
