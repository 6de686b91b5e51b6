"""What pyinfra reads before the inventory, where it is started: refuse one that does not exist.

Copy it into a repository of your own, beside where you call pyinfra.
"""

import pathlib as _pathlib
import sys as _sys

# For a checkout whose package is not installed; a repository of your own does not need it.
_sys.path.insert(0, str(_pathlib.Path(__file__).resolve().parent))
# pyinfra forbids it for the sake of its own files, and every run would compile all of ours anew.
_sys.dont_write_bytecode = bool(_sys.flags.dont_write_bytecode)

from spark_deploy.inventory import check_inventory as _check_inventory  # noqa: E402

_check_inventory()
