import sys
from pathlib import Path

# A checkout uses the contract of the same commit, not that of the environment. A wheel has it next
# to this package.
_CONTRACT = Path(__file__).resolve().parent.parent / "files" / "contract"
if _CONTRACT.is_dir() and str(_CONTRACT) not in sys.path[:1]:
    sys.path.insert(0, str(_CONTRACT))
