"""Core of dgx-spark-deploy: settings, plans, facts and operations."""

import sys
from pathlib import Path

# A checkout brings its own contract with hosts, whichever one an environment was made from: after
# ``git pull`` the code and the contract are of one commit. A wheel has it next to this package.
_CONTRACT = Path(__file__).resolve().parent.parent / "files" / "contract"
if _CONTRACT.is_dir() and str(_CONTRACT) not in sys.path[:1]:
    sys.path.insert(0, str(_CONTRACT))
