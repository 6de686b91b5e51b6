"""Reject a missing or empty inventory; pyinfra runs this file before it reads the inventory.

To use this check in your repository, copy the file to the directory in which you run pyinfra.
"""

import pathlib as _pathlib
import sys as _sys

# Only needed if the package is not installed.
_sys.path.insert(0, str(_pathlib.Path(__file__).resolve().parent))
# pyinfra disables bytecode, so every run would compile our modules again.
_sys.dont_write_bytecode = bool(_sys.flags.dont_write_bytecode)

from spark_deploy.inventory import check_inventory as _check_inventory  # noqa: E402

_check_inventory()
